"""Memory of many layouts at once is the memory of each, and its components add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.job import parse_job
from weft.planner.estimator import make_estimator
from weft.planner.explain_memory import explain_memory
from weft.planner.make_plan import make_plan, start_plan
from weft.planner.search.candidates import Layouts
from weft.planner.search.choose import plan_space
from weft.planner.search.space import all_layouts

MOE = {
    "family": "llama", "dim": 512, "layers": 8, "heads": 8, "ffn": 1024, "vocab": 32000,
    "experts": {"count": 8, "top_k": 2, "ffn": 512, "shared": 1, "first_dense": 2},
}  # fmt: skip


def job_of(model: Any, **sections: Any) -> Any:
    return parse_job(
        {
            "model": model, "data": {"source": "synthetic", "seq_len": 1024}, "train": {"global_batch": 64},
            "cluster": {"device": "h100-sxm", "nodes": 1, "devices_per_node": 8}, **sections,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("model", "precision"), [("llama-1b", "bf16"), (MOE, "bf16"), ("gpt2-125m", "fp32")])
def test_layouts_together_and_alone_have_the_same_memory(model: Any, precision: str) -> None:
    start = start_plan(job_of(model, precision=precision))
    estimator = make_estimator(start.job, start.plan, start.world, start.device, start.memory_gib)
    layouts = all_layouts(plan_space(start.job, start.plan, start.world))
    some = layouts.take(np.random.default_rng(0).integers(0, len(layouts), 60))
    together = estimator.peak_gib(some)
    for i in range(0, len(some), 3):
        alone = estimator.estimate(some.take([i]), detail=True)
        assert float(alone.peak_gib[0]) == pytest.approx(together[i], rel=1e-12), some.plan(i).layout()
        assert min(float(gib[0]) for gib in alone.memory.values()) >= -1e-9, alone.memory
    few = layouts.take(slice(0, None, max(1, len(layouts) // 400)))
    among_all = estimator.peak_gib(layouts)[:: max(1, len(layouts) // 400)]
    assert estimator.estimate(few, detail=True).peak_gib == pytest.approx(among_all, rel=1e-12)


def test_each_optimizer_has_its_own_bytes() -> None:
    held = {}
    for name in ("adamw", "sgd", "muon", "adafactor", "lars", "lamb"):
        job, plan = make_plan(job_of("llama-1b", optim={"name": name}, parallel={"dp_replicate": 8, "dp_shard": 1}))
        start = start_plan(job)
        estimator = make_estimator(job, start.plan, 8, start.device, start.memory_gib)
        held[name] = float(estimator.estimate(Layouts.one(plan), detail=True).memory["optimizer"][0])
    assert held["adamw"] == pytest.approx(2 * held["sgd"], rel=1e-6)
    assert (held["lars"], held["lamb"]) == (held["sgd"], held["adamw"])
    assert held["adafactor"] < 0.01 * held["adamw"] < held["sgd"] < held["muon"] < held["adamw"]


def test_the_explanation_adds_up() -> None:
    job, plan = make_plan(job_of("llama-8b", parallel={"dp_shard": 4, "pp": 2, "zero": 1}))
    lines = explain_memory(job, plan, 70.0).splitlines()
    gib = [float(line.split()[1]) for line in lines[1:]]
    assert sum(gib[:-1]) == pytest.approx(gib[-1], abs=0.01)
    assert gib[-1] == pytest.approx(plan.predicted["memory_gib"], abs=0.01)
    assert "× 4 B: whole until the last microbatch is done" in lines[2]
