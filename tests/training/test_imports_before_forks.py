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
from weft.training.rank import import_training
import_training()
assert "torch._dynamo" in sys.modules, "dynamo is imported in every rank instead of once"
assert not called, f"torch.cuda.{called[0]} was called: CUDA cannot be used in forks of this process"
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started: forks of this process can wait for it for ever"
"""


def test_imports_leave_cuda_and_threads_alone(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # as for ranks
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


COMPILED = """
import sys
import torch
from weft.models.kernel_internals import import_compiler
import_compiler()
assert "torch._inductor.lowering" in sys.modules and "torch._functorch.aot_autograd" in sys.modules
before = set(sys.modules)
torch.compile(torch.nn.Linear(2, 2).forward, dynamic=False, backend="inductor")
late = sorted(name for name in set(sys.modules) - before if name.startswith("torch."))
assert len(late) < 5, late
"""


def test_the_compiler_is_imported_before_a_model_is_compiled() -> None:
    """So that a spare, not its recovery, takes the time."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
