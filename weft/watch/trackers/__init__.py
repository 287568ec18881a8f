"""Experiment trackers: one small adapter each, listed in known_trackers.py."""
