"""Refusals: the settings that clash, their values, and what would work; without torch."""

from __future__ import annotations

from typing import Any

import pytest

from weft.job import JobError, parse_job
from weft.job.errors import Exit, FitError
from weft.planner import RUNNABLE, check, check_fits, make_plan

SMALL = {"dim": 64, "heads": 8, "kv_heads": 2, "layers": 2, "ffn": 96}


def prepare(world: int | None, job: dict[str, Any]) -> None:
    check(*make_plan(parse_job({"data": {"source": "synthetic"}, **job}), world), RUNNABLE)


def refused(world: int | None = None, **job: Any) -> str:
    with pytest.raises(JobError) as caught:
        prepare(world, job)
    assert caught.value.exit_code == Exit.JOB
    return str(caught.value)


@pytest.mark.parametrize(
    ("world", "job", "text"),
    [
        (6, {"model": {**SMALL, "heads": 12, "dim": 48, "kv_heads": 4}, "parallel": {"tp": 6}},
         "parallel.tp=6 and model.kv_heads=4 of head_dim=4: each rank has whole key and value heads, or an equal part "
         "of one; tp=1, 2 or 4 would work"),
        (4, {"model": {**SMALL, "heads": 6, "dim": 48, "kv_heads": 6}, "parallel": {"tp": 4}},
         "parallel.tp=4 does not divide model.heads=6; tp=1, 2, 3 or 6 would work"),
        (2, {"model": {**SMALL, "ffn": 33}, "parallel": {"tp": 2}},
         "model.ffn=33 is not a multiple of parallel.tp=2; model.ffn=34 would work"),
        (2, {"model": {"family": "mlp", "dim": 33, "layers": 2}, "parallel": {"tp": 2}},
         "model.dim=33 is not a multiple of parallel.tp=2; model.dim=34 would work"),
        (3, {"parallel": {"dp_shard": 3}},
         "train.global_batch=32 is not a multiple of the 3 data-parallel ranks; 30 or 33 would work"),
        (6, {"train": {"global_batch": 4}},
         "train.global_batch=4 is not a multiple of the 6 data-parallel ranks; 6 would work"),
        (2, {"train": {"global_batch": 8, "microbatch": 3}},
         "train.microbatch=3 does not divide the 4 sequences of a rank (global_batch 8 / 2 ranks); "
         "microbatch=2 would work"),
        (2, {"train": {"global_batch": 8, "accumulation": 8}},
         "train.accumulation=8 does not divide the 4 sequences of a rank (global_batch 8 / 2 ranks); "
         "accumulation=4 would work"),
        (2, {"train": {"global_batch": 8, "microbatch": 2, "accumulation": 4}},
         "train.microbatch=2 × train.accumulation=4 is not the 4 sequences of a rank (global_batch 8 / 2 ranks); "
         "leave one of them out"),
        (2, {"train": {"global_batch": 8}, "parallel": {"microbatches": 8}},
         "parallel.microbatches=8 does not divide the 4 sequences of a rank (global_batch 8 / 2 ranks); "
         "microbatches=4 would work"),
        (2, {"train": {"global_batch": 8, "microbatch": 2}, "parallel": {"microbatches": 4}},
         "train.microbatch=2 × parallel.microbatches=4 is not the 4 sequences of a rank (global_batch 8 / 2 ranks); "
         "leave one of them out"),
        (2, {"parallel": {"split": [3, 1]}},
         "parallel.split=[3, 1] needs a pipeline, but parallel.pp=1; leave split out or set parallel.pp=2"),
        (1, {"parallel": {"split": [4]}},
         "parallel.split=[4] needs a pipeline, but parallel.pp=1; leave split out"),
        (2, {"parallel": {"schedule": "zbv", "virtual_stages": 2}},
         "parallel.virtual_stages=2 needs a pipeline, but parallel.pp=1; leave virtual_stages out, or set "
         "parallel.pp=2"),
        (4, {"parallel": {"dp_shard": 3}},
         "parallel asks for dp_shard 3 = 3 ranks, but there are 4; set one axis to -1 for the rest, "
         "or start 3 ranks (--nproc 3)"),
        (4, {"parallel": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}},
         "parallel asks for dp_replicate 2 × dp_shard 2 × tp 2 = 8 ranks, but there are 4; set one axis to -1 for the "
         "rest, or start 8 ranks (--nproc 8)"),
        (4, {"parallel": {"dp_shard": 3, "tp": -1}},
         "parallel asks for dp_shard 3 = 3 ranks, which does not divide the 4 there are; a product of 2 or 4 would "
         "work, or 6 ranks (--nproc)"),
        (4, {"parallel": {"dp_shard": -1, "tp": -1}},
         "parallel.dp_shard and parallel.tp are both -1; only one axis can take the rest"),
        (2, {"model": "own:Net", "parallel": {"cp": 2}},
         "parallel.cp=2 splits the sequence, and own:Net has no known "
         "sequence dimension; use dp_replicate or dp_shard"),
        (2, {"model": {**SMALL, "family": "mlp"}, "parallel": {"cp": 2}},
         "parallel.cp=2 splits the sequence, and model.family=mlp has no known "
         "sequence dimension; use dp_replicate or dp_shard"),
        (1, {"model": {**SMALL, "family": "mlp"}, "memory": {"chunk": 8}},
         "memory.chunk=8 works on a transformer's blocks, and model.family=mlp is not a "
         "transformer; memory.chunk=0 with memory.recompute=full would work"),
        (16, {"model": SMALL, "parallel": {"cp": 16, "cp_style": "ulysses"}},
         "parallel.cp_style=ulysses cannot divide model.heads=8 and model.kv_heads=2 among cp=16 ranks; "
         "cp=1, 2, 4 or 8 would work, or cp_style=ring"),
        (2, {"model": SMALL, "parallel": {"cp": 2, "cp_style": "hybrid"}},
         "parallel.cp_style=hybrid with cp=2 and model.heads=8 and model.kv_heads=2 leaves no group between one rank "
         "and all of them; cp_style=ring would work"),
        (2, {"parallel": {"pp": 2, "schedule": "zb-h1"}, "memory": {"chunk": 8}},
         "memory.chunk=8 computes a block's gradients in one pass, and parallel.schedule=zb-h1 splits them; "
         "schedule=1f1b would work"),
        (1, {"model": "own:Net", "memory": {"offload": "activations"}},
         "memory.offload=activations works on a transformer's blocks, and own:Net is not a "
         "transformer; memory.offload=none with memory.recompute=full would work"),
        (2, {"memory": {"offload": "activations", "recompute": "none"}},
         "memory.recompute=none has no effect with memory.offload=activations, which already "
         "recomputes most of a block; recompute=auto would work"),
        (2, {"parallel": {"ep": 2}},
         "parallel.ep=2 distributes experts, and the model has none; ep=1 would work, or set model.experts"),
        (2, {"precision": "fp8", "cluster": {"device": "a100", "devices_per_node": 2}},
         "precision=fp8 needs fp8 products, which a100-sxm-80gb does not have; precision=bf16 would work"),
        (2, {"precision": "fp8", "model": {**SMALL, "dim": 16, "ffn": 24}, "parallel": {"tp": 2}},
         "precision=fp8 applies to no layer: with model.dim=16 over tp=2 no layer's sizes are multiples of 16; "
         "precision=bf16 would work"),
        (2, {"fp8": {"amax": "delayed", "scaling": "rowwise"}},
         "fp8.amax=delayed and fp8.scaling=rowwise: the rows of one step are not those of the next; scaling=tensorwise "
         "or amax=dynamic would work"),
        (2, {"memory": {"recompute": 99}, "model": "tiny"},
         "memory.recompute=99, but the model has 4 blocks; recompute=full recomputes them all"),
        (2, {"memory": {"recompute": "full", "budget_gib": 2}},
         "memory.budget_gib=2 chooses the recompute, and memory.recompute=full sets it; leave one of them "
         "out"),
        (2, {"memory": {"recompute": "selective"}, "parallel": {"pp": 2, "schedule": "zbv"}},
         "parallel.schedule=zbv runs a block's backward twice, for its input and for its weights, and "
         "memory.recompute=selective keeps outputs for one pass; recompute=full or schedule=1f1b would work"),
        (2, {"model": "own:Net", "parallel": {"pp": 2, "split": [4]}},
         "parallel.split=[4] must have 2 numbers from 1 up: parallel.pp × parallel.virtual_stages makes so many "
         "stages, and each has a part of the module"),
        (2, {"optim": {"layer_decay": 0.8}, "train": {"sync": "federated"}},
         "optim.layer_decay=0.8 does not support train.sync=federated; leave one of them out"),
        (2, {"model": {"shape": "tiny", "frozen": ["embed"]}},
         "model.frozen=embed needs a module of your own; model.lora trains few weights of Weft's models"),
        (2, {"comm": {"backend": "nccl"}, "cluster": {"device": "cpu"}},
         "comm.backend=nccl needs GPUs, and the ranks compute on CPUs; gloo would work"),
        (8, {"cluster": {"device": "h1000"}}, "cluster.device: unknown device 'h1000'; did you mean h100?"),
        (8, {"cluster": {"device": "h100", "network": "ib-nrd"}},
         "cluster.network: unknown network 'ib-nrd'; did you mean ib-ndr?"),
        (1, {"model": {"family": "vit", "dim": 32, "heads": 4, "layers": 2, "vocab": 3, "patch": 5},
             "data": {"source": "photos", "images": {"size": 16}}},
         "data.images.size=16 is not a multiple of model.patch=5; size=15 would work"),
        (1, {"model": {"dim": 30, "heads": 4, "layers": 2}},
         "model.dim=30 is not a multiple of model.heads=4; heads=3 would work"),
        (1, {"model": {**SMALL, "dim": 7}},
         "model.dim=7 is not a multiple of model.heads=8; heads=7 with kv_heads=7 would work"),
        (1, {"model": {"dim": 64, "heads": 4, "kv_heads": 3, "layers": 2}},
         "model.heads=4 is not a multiple of model.kv_heads=3; kv_heads=2 would work"),
        (1, {"model": {"dim": 20, "heads": 4, "layers": 2}},
         "rotary positions need an even head size; model.head_dim is 5"),
        (1, {"model": {"dim": 64}}, "model.layers is missing; give it, or name a model.shape such as tiny or llama-1b"),
        (1, {"model": "llama-1bb"}, "model.shape='llama-1bb' is not known; did you mean llama-1b?"),
        (1, {"model": {"family": "gpt2", "dim": 64, "heads": 4, "layers": 2, "max_len": 16}, "data": {"seq_len": 17}},
         "data.seq_len=17 is longer than the learned positions, model.max_len=16; shorten it, raise max_len, or use "
         "model.positions=rope"),
    ],
)  # fmt: skip
def test_refusals_name_the_clash_and_what_would_work(world: int, job: dict[str, Any], text: str) -> None:
    assert refused(world, **job) == text


def test_all_broken_rules_are_listed() -> None:
    result = refused(
        4,
        model={**SMALL, "heads": 6, "dim": 48, "ffn": 97},
        parallel={"tp": 4},
        train={"global_batch": 5, "microbatch": 2},
    )
    assert [line.split()[0] for line in result.splitlines()] == ["parallel.tp=4", "model.ffn=97", "train.microbatch=2"]


def test_exit_code_of_a_job_that_does_not_fit() -> None:
    job, plan = make_plan(
        parse_job(
            {
                "model": "8b",
                "data": {"source": "synthetic", "seq_len": 4096},
                "train": {"global_batch": 128},
                "cluster": {"device": "h100", "devices_per_node": 1},
            }
        )
    )
    with pytest.raises(FitError, match=r"need 134.6 GiB a rank, but h100-sxm has 79.1; use more ranks") as caught:
        check_fits(job, plan)
    assert caught.value.exit_code == Exit.FIT
    job, plan = make_plan(job, 8)
    check_fits(job, plan)
    assert plan.axes == {"pp": 1, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 1}


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        ({"dp_shard": 8, "zero": 1}, "cut more with parallel.zero=3, or use more ranks"),
        (
            {"dp_shard": 8, "zero": 3},
            "use more ranks, in parallel.dp_shard, parallel.tp or parallel.pp, or host memory for optimizer states "
            "with memory.offload=auto",
        ),
        ({"dp_replicate": 8}, "cut them with parallel.dp_shard instead of dp_replicate, or use more ranks"),
    ],
)
def test_advice_does_not_repeat_the_job(parallel: dict[str, Any], text: str) -> None:
    cluster = {"device": "h100", "devices_per_node": 8}
    job, plan = make_plan(
        parse_job({
            "model": "70b", "data": {"source": "synthetic"}, "cluster": cluster, "parallel": {"dp_shard": 1, **parallel}
        })
    )  # fmt: skip
    with pytest.raises(FitError) as caught:
        check_fits(job, plan)
    assert str(caught.value).endswith(f" GiB a rank, but h100-sxm has 79.1; {text}")


def test_microbatches_are_accumulation_without_a_pipeline_too() -> None:
    raw = {"train": {"global_batch": 8}, "parallel": {"microbatches": 4}, "data": {"source": "synthetic"}}
    _, plan = make_plan(parse_job(raw), 2)
    assert (plan.microbatch, plan.accumulation) == (1, 4)
