"""Holding a layout against one process: loss, every gradient, the norm, and what the update did to every weight."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from helpers import on_ranks
from weft.job import apply_overrides, parse_job
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import parse_layout, ranks
from weft.verify.prove import compare, with_layout

UPDATE_TOLERANCE: dict[str, float] = {"fp32": 2e-4, "bf16": 0.5, "fp16": 0.1, "fp8": 0.6}
"""Largest difference of a weight after the steps, as a share of the way it went. Adam divides small gradients by their
own size, so this is looser than what gradients are held to; a step of half the size would still be 0.5."""

NOISE = 1e-8
"""What a weight may differ by in any case: a key's bias has no gradient but rounding, and goes anywhere."""

BASE: dict[str, Any] = {
    "model": {"family": "llama", "dim": 16, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 32, "vocab": 48},
    "data": {"source": "synthetic", "seq_len": 8},
    "train": {"global_batch": 8, "accumulation": 2, "steps": 10},
    "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant", "clip": 0.5},
}


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
    """In words, everything in which a run is not the reference run; empty if it is the same."""
    ours, theirs = reference.result, other.result
    verdict = compare("", 0, ours.trace, theirs.trace, precision)
    found = []
    if verdict.verdict != "same":
        found.append(
            f"loss {verdict.max_loss_diff:.1e}, gradient {verdict.max_grad_diff:.1e} of {verdict.worst_parameter}, "
            f"norm {verdict.grad_norm_diff:.1e}, size {verdict.size_diff:.1e}, parameters {verdict.param_diff:.1e}"
        )
    if ours.trace.gradients[0].keys() != theirs.trace.gradients[0].keys():
        found.append(f"gradients of {ours.trace.gradients[0].keys() ^ theirs.trace.gradients[0].keys()}")
    found += [
        f"{name} began elsewhere" for name, first in ours.start.items() if not torch.equal(first, theirs.start[name])
    ]
    for what, before, mine, its in (
        ("weight", ours.start, ours.trace.parameters, theirs.trace.parameters),
        ("average", ours.start, ours.ema, theirs.ema),
    ):
        for name, value in mine.items():
            way = (value - before[name]).double().norm()
            off = (its[name] - value).double().norm()
            if not off <= UPDATE_TOLERANCE[precision] * way + NOISE * value.numel() ** 0.5:
                found.append(f"{what} {name} is off by {off:.1e} after a way of {way:.1e}")
    return found + disagreements(other)


def check(pool: RankPool, job: Job, layouts: Iterable[str]) -> None:
    """Each of these layouts is the same run as one process."""
    precision = "fp32" if job.precision == "auto" else job.precision
    reference = run(pool, job, "1")
    wrong = {
        layout: found for layout in layouts if (found := differences(reference, run(pool, job, layout), precision))
    }
    assert not wrong


def disagreements(run: Run) -> list[str]:
    """Weights of which two ranks hold the same shard with different bits."""
    held: dict[tuple[str, Any], str] = {}
    found = []
    for rank, seen in enumerate(run.seen):
        for name, (where, digest) in seen.shards.items():
            if held.setdefault((name, where), digest) != digest:
                found.append(f"rank {rank} holds another {name} than the ranks before it")
    return found
