"""Compiled blocks give the same gradients, and blocks of one class share compiled code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.job import parse_job
from weft.job.schema import Job
from weft.mesh import connect
from weft.models.build_model import build_model, loss_sum
from weft.parallel import compiled_units
from weft.parallel.apply import parallelize
from weft.planner import make_plan

BATCH = {
    "inputs": torch.arange(32).view(2, 16) % 61,
    "targets": torch.arange(1, 33).view(2, 16) % 61,
    "valid": torch.arange(32).view(2, 16) % 5 > 0,
    "ids": torch.arange(2),
}


EXPERTS = {"experts": {"count": 4, "ffn": 16, "shared": 1}}


def job_of(**sections: object) -> Job:
    model = {"family": "llama", "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61}
    base = {"data": {"source": "synthetic", "seq_len": 16}, "cluster": {"device": "cpu", "devices_per_node": 1}}
    return parse_job({**base, **sections, "model": {**model, **sections.get("model", {})}})  # type: ignore[dict-item]


def gradients(job: Job, compiled: bool) -> tuple[float, dict[str, Tensor]]:
    job, plan = make_plan(job)
    spread_model = parallelize(build_model(job.model), connect(plan), replace(plan, compile=compiled))
    total = spread_model.backward([BATCH], lambda m, b, hidden=None: loss_sum(m, b, job.model), 1.0)
    return float(total), {n: x.grad.clone() for n, x in spread_model.grad_params.items()}


@pytest.mark.parametrize(("sections", "graphs"), [
    ({"model": {"dropout": 0.2}}, 1),
    ({"memory": {"recompute": "full"}}, 1),
    ({"memory": {"recompute": "selective"}, "model": {"qk_norm": True}}, 1),
    ({"model": EXPERTS}, 3),  # before the sorting, the gate, and after
    ({"model": EXPERTS, "memory": {"recompute": "full"}}, 3),
    ({"model": EXPERTS, "memory": {"recompute": "selective"}}, 3),
], ids=["dropout", "full", "selective", "experts", "experts, full", "experts, selective"])  # fmt: skip
def test_compiled_blocks_share_their_graphs_and_give_the_same_gradients(
    sections: dict[str, object], graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_units, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    job = job_of(**sections)
    loss, plain = gradients(job, compiled=False)
    found, ours = gradients(job, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert found == pytest.approx(loss, rel=1e-5)
    for name, grad in plain.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-6)


def test_compile_defaults_by_device() -> None:
    assert not make_plan(job_of())[1].compile
    gpu = {"cluster": {"device": "h100-sxm", "devices_per_node": 1}}
    assert make_plan(job_of(**gpu))[1].compile
    assert not make_plan(job_of(**gpu, train={"compile": False}))[1].compile
    assert make_plan(job_of(train={"compile": True}))[1].compile
