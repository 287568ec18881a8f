"""Keeping a run alive: what can go wrong, who notices, and how it goes on."""
