"""Sections inside of `model`."""
