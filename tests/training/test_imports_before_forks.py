"""What a rank imports before it is forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECK = """
import os, sys
from pathlib import Path
import torch
called = []
for name in ("is_available", "_lazy_init"):
    setattr(torch.cuda, name, lambda name=name: called.append(name))
from weft.job.run_folder import RunDir
from weft.training.rank import import_training
import_training(RunDir(Path(sys.argv[1])))
assert "torch._dynamo" in sys.modules, "dynamo is imported in every rank instead of once"
assert not called, f"torch.cuda.{called[0]} was called: CUDA cannot be used in forks of this process"
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started: forks of this process can wait for it for ever"
"""


def test_imports_leave_cuda_and_threads_alone(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # as for ranks
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
