"""Experiment trackers: one small adapter each, listed in registry.py."""
