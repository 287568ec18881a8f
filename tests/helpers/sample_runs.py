"""Run folders as training leaves them."""

import json
import math
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from weft.job.files.run_folder import RunDir
from weft.watch.journal import Journal


@pytest.fixture
def make_run() -> Callable[..., RunDir]:
    return write_run


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    return record


@pytest.fixture
def make_slices() -> Callable[..., dict[str, Any]]:
    return slices


def write_run(path: Path, steps: int = 120, layers: int = 4, tp: int = 2, dp_shard: int = 2, pp: int = 1) -> RunDir:
    """A finished run that was resumed once, with every file the report reads."""
    run = RunDir(path)
    path.mkdir(parents=True)
    run.job.write_text("name: sample <b>&amp; more</b>\ntrain: {steps: 120}\n", encoding="utf-8")
    axes = {"pp": pp, "dp_replicate": 1, "dp_shard": dp_shard, "cp": 1, "tp": tp}
    plan = {
        "world": pp * dp_shard * tp,
        "axes": axes,
        "zero": 3,
        "microbatch": 4,
        "accumulation": 2,
        "precision": "bf16",
        "recompute": "none",
        "reasons": ["tp 2 keeps each matrix on one node", "</script><script>alert(1)</script>"],
        "predicted": {
            "memory_gib": 0.36,
            "step_time_s": 0.25,
            "tokens_per_s": 8200.0,
            "communication": {"share": 0.12},
        },
    }
    run.plan.write_text(json.dumps(plan))
    run.slices.write_text(json.dumps(slices(axes, layers)))
    rng = random.Random(0)
    with Journal(run) as journal:
        journal.event("start", step=0, host="node-1")
        journal.event("eval", step=0, val_loss=5.61)
        for step in range(1, steps + 1):
            journal.metrics(record(step, steps, rng))
            if step % 40 == 0:
                journal.event("eval", step=step, val_loss=1.6 + 4 * math.exp(-step / 40))
                journal.event("checkpoint", step=step, path=f"checkpoints/step-{step}", seconds=0.41)
            if step == steps // 2:
                journal.event("resume", step=step, host="node-1", message="continued from checkpoints/step-40")
        journal.event("done", step=steps)
    spread_times(run)
    return run


def record(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    took = 0.24 + 0.05 * rng.random() + (2.0 if step == 1 else 0.0)
    return {
        "step": step,
        "loss": 1.5 + 4 * math.exp(-step / 40) + 0.1 * rng.gauss(0, 1),
        "grad_norm": 0.8 + 3 * math.exp(-step / 20) + 0.1 * rng.random(),
        "lr": 3e-4 * min(1, step / 10) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
        "tokens": 2048 * step,
        "step_time_s": took,
        "tokens_per_s": 2048 / took,
        "mfu": 0.41 + 0.02 * rng.random(),
        "peak_memory_gib": 0.31 + (0.02 if step > steps / 2 else 0),
    }


def spread_times(run: RunDir) -> None:
    """Give the events the times of a run of several minutes."""
    begin = datetime(2025, 11, 15, 9, 30, tzinfo=UTC)
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    for i, line in enumerate(lines):
        line["time"] = (begin + timedelta(seconds=7 * i)).isoformat()
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))


def slices(axes: dict[str, int], layers: int, dim: int = 64) -> dict[str, Any]:
    """slices.json of a small llama: matrices split by tp and then by dp_shard, blocks split by pp."""
    coords = [
        {"pp": p, "dp_replicate": 0, "dp_shard": d, "cp": 0, "tp": t}
        for p in range(axes["pp"])
        for d in range(axes["dp_shard"])
        for t in range(axes["tp"])
    ]
    last = axes["pp"] - 1
    shapes: list[tuple[str, list[int], int | None, int]] = [("embed.weight", [256, dim], 0, 0)]
    for i in range(layers):
        stage = i * axes["pp"] // layers
        shapes += [(f"blocks.{i}.attn.{m}.weight", [dim, dim], 0, stage) for m in "qkv"]
        shapes += [
            (f"blocks.{i}.attn.o.weight", [dim, dim], 1, stage),
            (f"blocks.{i}.norm1.weight", [dim], None, stage),
        ]
        shapes += [(f"blocks.{i}.ffn.up.weight", [4 * dim, dim], 0, stage)]
        shapes += [
            (f"blocks.{i}.ffn.down.weight", [dim, 4 * dim], 1, stage),
            (f"blocks.{i}.norm2.weight", [dim], None, stage),
        ]
    shapes += [("norm.weight", [dim], None, last), ("head.weight", [256, dim], 0, last)]
    parameters = []
    for name, shape, cut, stage in shapes:
        held = []
        for rank, c in enumerate(coords):
            if c["pp"] != stage:
                continue
            offset, size = [0] * len(shape), list(shape)
            for dim_cut, axis in ((cut, "tp"), (0, "dp_shard")):
                if dim_cut is not None:
                    size[dim_cut] //= axes[axis]
                    offset[dim_cut] += c[axis] * size[dim_cut]
            held.append({"rank": rank, "offset": offset, "size": size})
        parameters.append({"name": name, "shape": shape, "ranks": held})
    return {"ranks": [{"rank": i, "coords": c} for i, c in enumerate(coords)], "axes": axes, "parameters": parameters}
