"""Alerts about a run: rules that find them, and targets that receive them."""
