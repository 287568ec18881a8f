"""Fixtures of the tests of targets: real clusters on this machine, and a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.interpreter import ForkedInterpreter
from helpers.real_clusters import SlurmCluster, SshHosts


@pytest.fixture(scope="session")
def interpreter() -> Iterator[str]:
    """An executable that nodes start instead of Python: a fork costs a tenth of the CPU time."""
    with ForkedInterpreter() as made:
        yield made.path


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[SshHosts]:
    with SshHosts() as hosts:
        yield hosts
