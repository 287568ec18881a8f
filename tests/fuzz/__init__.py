"""Fuzzing of Weft: a minute in CI, hours by hand."""
