"""Scoring the estimates against tables of published runs."""
