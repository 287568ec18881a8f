"""Fixtures of the tests of what reads run folders."""

from helpers.sample_runs import make_record, make_run, make_slices

__all__ = ["make_record", "make_run", "make_slices"]
