"""Authenticated messages between processes of a run that share no process group: supervisors, servers, workers."""
