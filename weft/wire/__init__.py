"""Signed messages between the processes of a run that are no ranks of one group: supervisors, servers, workers."""
