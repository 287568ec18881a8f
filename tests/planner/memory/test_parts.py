"""Each setting changes the components of the memory that it is about, and they add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.job import parse_job
from weft.planner import make_plan
from weft.planner.estimator import make_estimator
from weft.planner.job_estimate import estimate_job
from weft.planner.make_plan import start_plan
from weft.planner.memory.peak_walk import PARTS
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts
from weft.planner.search.space import all_layouts, job_space
from weft.planner.time.buckets import bucket_sizes

LLAMA: dict[str, Any] = {"family": "llama", "dim": 2048, "layers": 16, "heads": 16, "ffn": 5632, "vocab": 32000}
MOE = {**LLAMA, "experts": {"count": 8, "top_k": 2, "ffn": 2048}}


def parts(
    model: dict[str, Any] = LLAMA, seq_len: int = 2048, accumulation: int = 1, **sections: Any
) -> dict[str, float]:
    """GiB by component on 4 GPUs; dp_replicate 4 without accumulation unless said."""
    job = {
        "model": model, "data": {"source": "synthetic", "seq_len": seq_len}, "precision": "bf16",
        "train": {"global_batch": 4 * accumulation, "microbatch": 1}, "memory": {"recompute": "none"},
        "cluster": {"device": "h200", "devices_per_node": 4}, "parallel": {"dp_replicate": 4, "dp_shard": 1},
        **sections,
    }  # fmt: skip
    if "global_batch" not in job["train"]:
        job["train"] = {"global_batch": 4 * accumulation, "microbatch": 1, **job["train"]}
    found = estimate_job(*make_plan(parse_job(job)))
    assert tuple(found["memory"]) == PARTS and min(found["memory"].values()) >= 0
    assert sum(found["memory"].values()) == pytest.approx(found["peak_memory_gib"], rel=1e-12)
    return dict(found["memory"])


def sharded(zero: int, **sections: Any) -> dict[str, float]:
    return parts(parallel={"dp_shard": 4, "zero": zero}, **sections)


def test_each_zero_stage_shards_more() -> None:
    plain, one, two, three = parts(accumulation=4), *(sharded(zero, accumulation=4) for zero in (1, 2, 3))
    assert one["optimizer"] == pytest.approx(plain["optimizer"] / 4, rel=0.01)
    # weights that are gathered for the whole step are parameters; zero 3 has shards, and communicates the rest
    assert three["parameters"] < plain["parameters"] / 4 < one["parameters"] == two["parameters"]
    assert one["parameters"] == pytest.approx(three["parameters"] + plain["parameters"] / 3, rel=0.01)
    # whole gradients wait for the last microbatch under zero 1 alone
    assert one["gradients"] > 3 * two["gradients"] and two["gradients"] == pytest.approx(three["gradients"], rel=0.2)
    assert two["communication"] < three["communication"] < one["parameters"]  # gathered weights of a few blocks


def test_accumulation_adds_whole_gradients_under_zero_1_only() -> None:
    assert sharded(1, accumulation=4)["gradients"] > 2 * sharded(1)["gradients"]
    for zero in (2, 3):
        several, many = (sharded(zero, accumulation=count)["gradients"] for count in (2, 4))
        assert several == many < sharded(1, accumulation=2)["gradients"] / 3


def test_offload_moves_activations_to_the_host() -> None:
    before = sharded(3)
    less = sharded(3, memory={"recompute": "auto", "offload": "activations", "host_gib": 100})
    assert less["activations"] < 0.2 * before["activations"] and less["optimizer"] == before["optimizer"]


def test_recompute_and_precision_change_what_blocks_keep() -> None:
    none, selective, full = (
        parts(memory={"recompute": option}, seq_len=8192) for option in ("none", "selective", "full")
    )
    assert none["activations"] > selective["activations"] > full["activations"]
    assert none["parameters"] == full["parameters"] and none["optimizer"] == full["optimizer"]
    low = parts(precision="fp8", seq_len=8192)
    assert low["activations"] < none["activations"] and low["parameters"] == none["parameters"]
    assert parts(precision="fp32", seq_len=8192)["activations"] > 1.5 * none["activations"]


def test_compile_has_scratch_and_keeps_less() -> None:
    compiled, eager = parts(), parts(train={"compile": False})
    assert compiled["runtime"] > eager["runtime"] and compiled["activations"] < eager["activations"]
    assert compiled["parameters"] == eager["parameters"]


def test_compression_keeps_a_residual() -> None:
    plain, compressed = parts(), parts(comm={"compression": "topk:0.01"})
    assert compressed["communication"] > plain["communication"] and compressed["optimizer"] == plain["optimizer"]
    assert sum(compressed.values()) > sum(plain.values())


def test_experts_are_cut_by_ep() -> None:
    whole, cut = parts(MOE), parts(MOE, parallel={"dp_shard": 4, "zero": 3, "ep": 4})
    assert cut["parameters"] < whole["parameters"] / 3 and cut["optimizer"] < whole["optimizer"] / 3
    assert whole["parameters"] > 1.5 * parts()["parameters"]


def test_long_sequences_run_in_chunks() -> None:
    long, longer = (sharded(3, seq_len=n, memory={"recompute": "auto"}) for n in (131_072, 262_144))
    assert longer["activations"] == pytest.approx(2 * long["activations"], rel=0.05)
    # a block keeps its input and attention's output
    assert long["activations"] == pytest.approx(16 * 131_072 * 2 * 2048 * 2 / 2**30, rel=0.3)


T5 = {"family": "t5", "dim": 1024, "layers": 20, "heads": 16, "vocab": 32128}
PARTLY_DENSE = {**LLAMA, "experts": {"count": 8, "top_k": 2, "ffn": 2048, "first_dense": 3}}


@pytest.mark.parametrize("model", [{**LLAMA, "layers": 17}, T5, PARTLY_DENSE])
def test_the_peak_is_that_of_the_fullest_rank(model: dict[str, Any]) -> None:
    raw = {
        "model": model, "data": {"source": "synthetic", "seq_len": 1024}, "train": {"global_batch": 32},
        "cluster": {"device": "a100", "devices_per_node": 5},
    }  # fmt: skip
    start = start_plan(parse_job(raw))
    estimator = make_estimator(start.job, start.plan, start.world, start.device, start.memory_gib)
    layouts = all_layouts(job_space(start.job, start.world, "bf16"))
    layouts = layouts.take(np.flatnonzero(layouts.pp == 5)[::3])
    ranks = [sum(estimator.stage_gib(layouts, np.full(len(layouts), rank)).values()) for rank in range(5)]
    assert estimator.peak_gib(layouts) == pytest.approx(np.max(ranks, axis=0), rel=1e-9)


@pytest.mark.parametrize("layout", [{"dp_replicate": 2, "tp": 2}, {"dp_replicate": 4}])
def test_memory_counts_the_buckets_that_the_plan_gets(layout: dict[str, int]) -> None:
    raw: Any = {
        "model": LLAMA, "data": {"source": "synthetic", "seq_len": 2048}, "train": {"global_batch": 4},
        "cluster": {"device": "h200", "devices_per_node": 4}, "parallel": layout, "comm": {"compression": "fp16"},
    }  # fmt: skip
    job, plan = make_plan(parse_job(raw))
    assert bucket_sizes(job, plan, Layouts.one(plan)) == plan.bucket_mb
    assert plan.bucket_mb != Plan.bucket_mb
