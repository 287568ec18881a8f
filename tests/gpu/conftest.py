"""Tests that need an NVIDIA GPU: `make test-gpu`. Without one they end with exit code 4 instead of being skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.hardware.probe import probe
from weft.hardware.shared_devices import multi_process_service
from weft.job.errors import Exit
from weft.launch.rank_pool import RankPool

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Set to run the Triton kernels, and only those, on a CPU."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if INTERPRETED and collection_path.name not in ("gpu", "test_kernels.py") else None


def pytest_configure() -> None:
    if not probe().gpus and not INTERPRETED:
        pytest.exit("tests/gpu need an NVIDIA GPU, and this machine has none", returncode=int(Exit.MACHINE))


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[RankPool]:
    """NCCL ranks that share the GPUs of this machine."""
    with multi_process_service() as environment, RankPool(120.0, environment) as pool:
        yield pool
