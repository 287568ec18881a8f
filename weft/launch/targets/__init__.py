"""The targets of `weft launch`: one module a target, registered in registry.py."""
