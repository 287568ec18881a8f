"""Fixtures of the tests of extensions: run folders, and real clusters on this machine."""

from helpers.cluster_fixtures import interpreter, slurm, ssh_hosts
from helpers.sample_runs import make_record, make_run, make_slices

__all__ = ["interpreter", "make_record", "make_run", "make_slices", "slurm", "ssh_hosts"]
