"""The targets of `weft launch`: one module a target, listed in known_targets.py."""
