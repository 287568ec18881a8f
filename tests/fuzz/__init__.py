"""Fuzzing: random and known bad inputs against everything that Weft reads."""
