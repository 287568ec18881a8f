"""Resilience: supervisors, snapshots, many nodes and what they agree on."""
