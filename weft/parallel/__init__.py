"""How a model is spread: apply.py, the one fixed order, and one file an axis."""
