"""Recommenders: models with embedding tables."""
