"""Predicted memory is within 3 % of what Weft's runs on one H200 used (docs/one-gpu.md, docs/context.md), and within
5 % for jobs that were drawn at random (bench/gpu_random.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.job import parse_job
from weft.planner import make_plan

SHAPES: dict[str, Any] = {
    "1b": {"shape": "llama-1b", "vocab": 128256, "tied": False},
    "3b": {"shape": "llama-3b", "vocab": 128256, "tied": False},
    "tied": {"family": "llama", "dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256,
             "tied": True},
}  # fmt: skip
FP8: dict[str, Any] = {
    "bf16": {"precision": "bf16"}, "fp8": {"precision": "fp8"},
    "dynamic": {"precision": "fp8", "fp8": {"amax": "dynamic", "head": False}},
}  # fmt: skip
RUNS: tuple[tuple[str, int, int, int, str, str, float], ...] = (
    ("1b", 8192, 2, 1, "none", "bf16", 41.3),
    ("1b", 8192, 2, 1, "none", "dynamic", 34.3),
    ("1b", 8192, 2, 1, "none", "fp8", 37.8),
    ("1b", 8192, 2, 1, "selective", "bf16", 34.3),
    ("1b", 8192, 2, 2, "full", "bf16", 29.3),
    ("1b", 32768, 1, 1, "full", "bf16", 25.9),
    ("3b", 8192, 1, 1, "none", "bf16", 69.9),
    ("3b", 8192, 1, 1, "none", "dynamic", 62.8),
    ("3b", 8192, 1, 1, "none", "fp8", 65.6),
    ("3b", 8192, 1, 1, "selective", "bf16", 62.8),
    ("3b", 8192, 1, 1, "full", "bf16", 54.0),
    ("3b", 32768, 1, 1, "none", "bf16", 128.2),
    ("3b", 32768, 1, 1, "selective", "bf16", 103.7),
    ("3b", 32768, 1, 1, "full", "bf16", 57.4),
    ("tied", 8192, 1, 1, "none", "bf16", 28.5),
    ("tied", 32768, 1, 1, "none", "bf16", 56.6),
    ("tied", 131072, 1, 1, "auto", "bf16", 38.2),
    ("tied", 524288, 1, 1, "auto", "bf16", 104.5),
)
"""Shape, tokens of a sequence, microbatch, microbatches, recompute, precision, and the measured GiB."""


@pytest.mark.parametrize(("shape", "seq_len", "microbatch", "count", "recompute", "precision", "gib"), RUNS)
def test_predicted_memory_is_that_of_the_run(
    shape: str, seq_len: int, microbatch: int, count: int, recompute: str, precision: str, gib: float
) -> None:
    job = {
        "model": SHAPES[shape], "data": {"source": "synthetic", "seq_len": seq_len}, "memory": {"recompute": recompute},
        "train": {"global_batch": count * microbatch, "microbatch": microbatch},
        "cluster": {"device": "h200", "devices_per_node": 1}, **FP8[precision],
    }  # fmt: skip
    _, plan = make_plan(parse_job(job))
    assert allocated(plan.predicted) == pytest.approx(gib, rel=0.03)


def allocated(predicted: dict[str, float]) -> float:
    """GiB of torch's allocator, which is what was measured."""
    return predicted["memory_gib"] - predicted["runtime_gib"]


RANDOM = json.loads((Path(__file__).parents[3] / "bench" / "gpu_runs.json").read_text())


@pytest.mark.parametrize("run", RANDOM, ids=lambda run: f"{run['job']['model']['family']}-{run['gib']}")
def test_predicted_memory_of_random_jobs(run: dict[str, Any]) -> None:
    _, plan = make_plan(parse_job({**run["job"], "cluster": {"device": "h200", "devices_per_node": 1}}))
    assert allocated(plan.predicted) == pytest.approx(run["gib"], rel=0.05)
