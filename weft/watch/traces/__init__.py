"""Traces of all ranks of a run, and the parts of a step's time."""
