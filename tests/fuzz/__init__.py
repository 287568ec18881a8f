"""Fuzzing: random and known bad inputs against everything that Weft reads; a minute in CI, hours by hand."""
