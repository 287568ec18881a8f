"""The Triton kernels under Triton's interpreter, on a CPU. On GPUs the same tests run compiled: `make test-gpu`."""

from __future__ import annotations

import subprocess
import sys

from helpers.command import ENV
from helpers.forked_python import ROOT


def test_kernels_agree_with_their_references() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu/test_kernels.py", "-q", "-n", "0"],
        cwd=ROOT, env={**ENV, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n(Triton is in the dev extras: pip install -e '.[dev]')"
