"""Frozen weights have no gradients, optimizer states or master copies, and the planner counts that."""

from __future__ import annotations

import pytest

from weft.job import parse_job
from weft.planner import make_plan
from weft.planner.describe import describe_plan
from weft.planner.memory.engine_memory import EngineMemory, Place
from weft.planner.model.counts import count_parameters, count_trained, flops_per_token
from weft.planner.search.candidates import Layouts

LORA = {"rank": 16, "targets": ["q", "v"]}


@pytest.mark.parametrize("shards", [1, 8])
def test_memory_of_adapters(shards: int) -> None:
    raw = {
        "model": {"shape": "llama-8b", "lora": LORA},
        "data": {"source": "synthetic", "seq_len": 2048},
        "train": {"global_batch": 8, "microbatch": 1},
        "cluster": {"device": "h100-sxm", "devices_per_node": shards},
        "parallel": {"dp_shard": shards} if shards > 1 else {"dp_replicate": 1},
        "precision": "bf16",
    }
    job, plan = make_plan(parse_job(raw))
    counts = count_parameters(job.model)
    assert counts is not None
    trained = count_trained(job.model)
    assert trained == 32 * 16 * (4096 + 4096 + 4096 + 1024)
    group = EngineMemory(job, plan).group(Layouts.one(plan), Place(0))
    states = group.states(group.held)
    held = {name: float(size[0]) * shards for name, size in states.items()}
    assert held["frozen"] == pytest.approx(2 * (counts.total - trained), rel=1e-3)
    assert held["parameters"] == 4 * trained
    assert held["gradients"] <= 4.01 * trained
    assert held["optimizer"] == pytest.approx(8 * trained, rel=1e-3)
    assert "6.82M in adapters are trained" in describe_plan(job, plan)
    whole = job.model.model_copy(update={"lora": None})
    assert flops_per_token(job.model, 2048) == pytest.approx(0.68 * flops_per_token(whole, 2048), rel=0.03)
