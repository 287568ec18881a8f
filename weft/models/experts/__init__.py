"""Experts: routing, and products of many small matrices at once."""
