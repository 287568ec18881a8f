"""Every layout over NCCL, on four ranks that share the GPUs of this machine, is the same run as one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.job import parse_job
from weft.launch.rank_pool import RankPool
from weft.planner.schedules.known_schedules import SCHEDULES
from weft.verify.prove import prove

MODEL: dict[str, Any] = {
    "family": "llama", "dim": 256, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 512, "vocab": 512,
}  # fmt: skip
JOB: dict[str, Any] = {
    "data": {"source": "synthetic", "seq_len": 64},
    "train": {"global_batch": 8, "steps": 10, "compile": False},
    "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant", "clip": 0.5},
    "cluster": {"device": "cuda"},
}
EXPERTS = {**MODEL, "experts": {"count": 8, "top_k": 2, "ffn": 128}}


def check(
    pool: RankPool, layouts: list[str], precision: str, model: dict[str, Any] | None = None, **sections: Any
) -> None:
    job = parse_job({**JOB, "model": model or MODEL, "precision": precision, **sections})
    verdicts = prove(job, layouts, 2, pool=pool)
    assert [replace(v, grad_diff_by_parameter={}) for v in verdicts if v.verdict != "same"] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_every_schedule(shared_ranks: RankPool, precision: str) -> None:
    check(shared_ranks, [f"pp4 {name} microbatches=8" for name in SCHEDULES], precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_pipelines_with_other_axes(shared_ranks: RankPool, precision: str) -> None:
    layouts = ["pp2 1f1b tp2", "pp2 zbv dp_shard=2 microbatches=4", "pp2 zb-h1 cp2", "pp2 dualpipe-v dp_replicate=2"]
    check(shared_ranks, layouts, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_other_layouts(shared_ranks: RankPool, precision: str) -> None:
    layouts = ["ddp4", "dp_shard=4 zero=1", "dp_shard=4 zero=2", "dp_shard=4 zero=3", "hsdp", "tp4", "tp2 dp_shard=2"]
    check(shared_ranks, [*layouts, "cp4 ring", "cp4 ulysses", "cp2 tp2"], precision)


def test_experts(shared_ranks: RankPool) -> None:
    layouts = ["dp_shard=4 ep=4", "dp_shard=2 tp2 ep=2", "pp2 dp_shard=2 ep=2"]
    check(shared_ranks, layouts, "fp32", EXPERTS)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_compiled_experts_with_recompute(shared_ranks: RankPool, recompute: str) -> None:
    train, memory = {**JOB["train"], "compile": True}, {"recompute": recompute}
    layouts = ["dp_shard=4 ep=4", "dp_shard=2 tp2 ep=2", "pp2 dp_shard=2 ep=2"]
    check(shared_ranks, layouts, "bf16", {**EXPERTS, "layers": 2}, train=train, memory=memory)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_windows_and_sinks(shared_ranks: RankPool, precision: str) -> None:
    """Chunks of keys that no window reaches are not sent."""
    model = {**MODEL, "window": 12, "window_layers": [0, 2, 3, 5], "sinks": True}
    check(shared_ranks, ["cp4 ring", "cp4 ulysses", "cp2 tp2", "pp2 cp2", "dp_shard=2 tp=2 zero=3"], precision, model)
    check(shared_ranks, ["cp4 ring", "cp4 hybrid"], precision, {**model, "sinks": False})
    check(shared_ranks, ["cp4 ring", "cp2 ulysses"], precision, model, memory={"chunk": 8})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_documents(shared_ranks: RankPool, precision: str) -> None:
    """The host waits for the documents of each microbatch, in pipelines too."""
    data = {"source": "pydoc", "seq_len": 256, "mask_documents": True}
    layouts = ["pp4 1f1b microbatches=8", "pp2 zbv dp_shard=2 microbatches=4", "cp4 ring", "cp4 hybrid", "cp2 tp2"]
    check(shared_ranks, [*layouts, "dp_shard=4 zero=3", "pp2 cp2 ulysses"], precision, data=data)
    model = {**MODEL, "window": 12, "window_layers": [0, 2, 3, 5], "sinks": True}
    check(shared_ranks, ["cp4 ring", "cp4 ulysses", "tp2 dp_shard=2"], precision, model, data=data)
    check(shared_ranks, ["cp2 ring", "tp2"], precision, data=data, memory={"chunk": 64})


@pytest.mark.parametrize(
    ("name", "precision"),
    [("muon", "fp32"), ("muon", "bf16"), ("adafactor", "fp32"), ("lamb", "fp32"), ("lars", "fp32")],
)
def test_optimizers_that_combine_elements(shared_ranks: RankPool, name: str, precision: str) -> None:
    layouts = ["dp_shard=4 zero=1", "dp_shard=4 zero=3", "tp2 dp_shard=2", "pp2 dp_replicate=2"]
    check(shared_ranks, layouts, precision, optim={**JOB["optim"], "name": name})
