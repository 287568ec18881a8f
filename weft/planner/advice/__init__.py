"""Advice about a plan: why, why not, what would fit, offers, goodput and hyper-parameters."""
