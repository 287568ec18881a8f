"""Starts ranks, watches their heartbeats, and restarts the run after a fault."""
