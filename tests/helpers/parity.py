"""Compares a layout with one process: loss, gradients, norm, optimizer state and updates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from helpers import on_ranks
from weft.job import apply_overrides, parse_job
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import parse_layout, ranks
from weft.verify.compare import Trace, compare
from weft.verify.prove import with_layout

BASE: dict[str, Any] = {
    "model": {"family": "llama", "dim": 16, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 32, "vocab": 48},
    "data": {"source": "synthetic", "seq_len": 8},
    "train": {"global_batch": 8, "accumulation": 2, "steps": 10},
    "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant", "clip": 0.5},
}

NOT_OURS: dict[str, Any] = dict.fromkeys(("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab"))
"""Fields of the default model that a user module does not have."""


ONE_PASS = "train.accumulation=1"
"""For matrices whose subject is the model or the optimizer: whether passes add up depends on the layout alone, so one
matrix of each axis has two."""


@dataclass(frozen=True)
class Run:
    """A layout's run, and what each of its ranks saw."""

    result: on_ranks.Result
    seen: list[on_ranks.Seen]


def make_job(*overrides: str, **sections: Any) -> Job:
    """BASE with sections merged in and key=value overrides on top."""
    raw = {key: dict(value) for key, value in BASE.items()}
    for key, value in sections.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_job(apply_overrides(raw, overrides))


def section(layout: str) -> dict[str, Any]:
    """A layout's words as a `parallel` section; `no-sequence` keeps norms whole under tp."""
    words = layout.removesuffix("no-sequence").strip()
    found = parse_layout(words) if words != "1" else {"dp_replicate": 1, "dp_shard": 1}
    return found if words == layout else {**found, "sequence": False}


def run(pool: RankPool, job: Job, layout: str, steps: int = 2, *args: Any) -> Run:
    """A few steps of a job under a layout."""
    spread = section(layout)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.pt"
        seen = pool.run(on_ranks.observe, ranks(spread), make_plan(with_layout(job, spread)), steps, str(file), *args)
        return Run(torch.load(file, weights_only=False), seen)


def differences(reference: Run, other: Run, precision: str = "fp32") -> list[str]:
    """Everything in which a run differs from the reference; empty if it is the same run."""
    ours, theirs = reference.result, other.result
    found = compared(ours.trace, theirs.trace, precision)
    started = [n for n, value in ours.trace.start.items() if not torch.equal(value, theirs.trace.start[n])]
    found += [f"{name} starts with other values" for name in started]
    averages = (replace(each.trace, parameters=each.ema) for each in (ours, theirs) if each.ema)
    found += [f"averages: {what}" for what in compared(*averages, precision)] if ours.ema else []
    return found + disagreements(other.seen)


def compared(reference: Trace, other: Trace, precision: str, exact: Trace | None = None) -> list[str]:
    """What the comparison of `weft prove` finds beyond its tolerance."""
    found = compare("", 0, reference, other, precision, exact)
    return [f"{what}: {found}" for what in found.differs]


def check(pool: RankPool, job: Job, layouts: Iterable[str], steps: int = 0, reference: Run | None = None) -> None:
    """Each of these layouts is the same run as one process. A second step also shows that the updated weights are used,
    which depends on the layout alone: one matrix of each axis takes two steps. So does low precision by default, where
    the first update of AdamW depends on the rounding of gradients near 0."""
    precision = "fp32" if job.precision == "auto" else job.precision
    steps = steps or (1 if precision == "fp32" else 2)
    reference = reference or run(pool, job, "1", steps)
    runs = {layout: run(pool, job, layout, steps) for layout in layouts}
    wrong = {layout: found for layout, other in runs.items() if (found := differences(reference, other, precision))}
    assert not wrong


def disagreements(everyone: list[on_ranks.Seen]) -> list[str]:
    """Weights of which two ranks hold the same shard with different bits."""
    held: dict[tuple[str, Any], str] = {}
    found = []
    for rank, seen in enumerate(everyone):
        for name, (where, digest) in seen.shards.items():
            if held.setdefault((name, where), digest) != digest:
                found.append(f"rank {rank} holds another {name} than the ranks before it")
    return found
