"""Tests that need an NVIDIA GPU: `make test-gpu`. Without one they end with exit code 4 instead of being skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.hardware.probe import probe
from weft.hardware.shared_devices import multi_process_service
from weft.job.errors import Exit
from weft.launch.rank_pool import RankPool


def pytest_configure() -> None:
    if not probe().gpus:
        pytest.exit("tests/gpu need an NVIDIA GPU, and this machine has none", returncode=int(Exit.MACHINE))


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[RankPool]:
    """NCCL ranks that share the GPUs of this machine."""
    with multi_process_service() as environment, RankPool(120.0, environment) as pool:
        yield pool
