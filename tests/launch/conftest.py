"""Fixtures of the tests of targets."""

from helpers.cluster_fixtures import interpreter, slurm, ssh_hosts

__all__ = ["interpreter", "slurm", "ssh_hosts"]
