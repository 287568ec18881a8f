"""Supervised runs on GPUs: ranks are forked, share the device over NCCL, and survivors of a fault stay alive."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from weft.extensions.chaos.experiment import run_experiment
from weft.extensions.chaos.fault_injector import Experiment
from weft.job import parse_job

JOB: dict[str, Any] = {
    "model": {"family": "llama", "dim": 128, "layers": 4, "heads": 4, "ffn": 256, "vocab": 512},
    "data": {"source": "synthetic", "seq_len": 64},
    "train": {"global_batch": 8, "steps": 60, "compile": False},
    "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant"},
    "cluster": {"device": "cuda", "share_devices": True},
    "precision": "fp32",
    "checkpoint": {"every": 0},
    "resilience": {"rebalance": False},
}

BEGINS = re.compile(r"attempt (\d+) begins, in slot \d+, process (\d+)")


def replaced_ranks(run: Path) -> list[list[int]]:
    """For each attempt after the first, the ranks that have another process than before."""
    processes: dict[int, dict[int, str]] = {}
    for log in (run / "logs").glob("rank-*.log"):
        for attempt, process in BEGINS.findall(log.read_text(encoding="utf-8")):
            processes.setdefault(int(attempt), {})[int(log.stem.removeprefix("rank-"))] = process
    return [
        sorted(rank for rank, process in now.items() if before[rank] != process)
        for before, now in pairwise(processes[number] for number in sorted(processes))
    ]


@pytest.mark.parametrize(
    ("ranks", "parallel", "faults"),
    [(1, {}, "kill"), (2, {"pp": 2}, "kill:3"), (4, {"dp_shard": 4}, "kill,stop"), (2, {"tp": 2}, "sleep")],
)
def test_run_recovers_and_ends_the_same(tmp_path: Path, ranks: int, parallel: dict[str, int], faults: str) -> None:
    job = parse_job({**JOB, "name": "faulty", "runs_dir": str(tmp_path), "parallel": parallel or "auto"})
    found = run_experiment(Experiment(job, ranks, faults, timeout_s=60.0), print)
    assert found.finished, found.why
    assert found.bitwise_equal
    assert found.starts == 1
    assert all(o.resume_s is not None and (o.steps_lost or 0) <= 1 for o in found.outcomes), found.outcomes
    assert replaced_ranks(Path(found.run)) == [[o.rank] for o in found.outcomes], "other ranks were replaced too"
