"""Plans of the theory's example jobs and of every named shape, made without torch and counted right."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from weft.job import JobError, parse_job
from weft.job.shapes import SHAPES, resolve
from weft.planner import Plan, make_plan
from weft.planner.model.counts import count_parameters, flops_per_sample, flops_per_token
from weft.planner.rules.layout_syntax import parse_layout, parse_layouts, ranks

THEORY: dict[str, dict[str, Any]] = {
    "three nodes of four GPUs, data parallel": {
        "model": "gpt2-125m", "data": {"source": "synthetic", "seq_len": 1024},
        "cluster": {"device": "v100", "nodes": 3, "devices_per_node": 4}, "parallel": {"dp_replicate": -1},
        "comm": {"backend": "nccl"}, "precision": "fp16", "train": {"global_batch": 96, "accumulation": 4},
        "optim": {"clip": 1.0},
    },
    "a ViT on 64 GPUs with tp 4": {
        "model": "vit-l", "data": {"source": "synthetic", "seq_len": 196},
        "cluster": {"device": "a100", "nodes": 8, "devices_per_node": 8}, "parallel": {"tp": 4},
        "train": {"global_batch": 1024},
    },
    "175B with tp 8 × pp 16 × dp": {
        "model": "175b", "data": {"source": "synthetic", "seq_len": 2048},
        "cluster": {"device": "a100", "nodes": 128, "devices_per_node": 8},
        "parallel": {"tp": 8, "pp": 16, "dp_shard": -1, "zero": 1}, "train": {"global_batch": 1536, "microbatch": 1},
    },
}  # fmt: skip

EXPECTED = {
    "three nodes of four GPUs, data parallel": ("dp_replicate 12", 12, "nccl", "fp16", 2, 4),
    "a ViT on 64 GPUs with tp 4": ("dp_shard 16 (zero 3) × tp 4", 64, "nccl", "bf16", 64, 1),
    "175B with tp 8 × pp 16 × dp": ("pp 16 (1f1b) × dp_shard 8 (zero 1) × tp 8", 1024, "nccl", "bf16", 1, 192),
}


@pytest.mark.parametrize("name", THEORY)
def test_the_theory_s_examples(name: str) -> None:
    job, plan = make_plan(parse_job(THEORY[name]))
    figures = (plan.layout(), plan.world, plan.backend, plan.precision, plan.microbatch, plan.accumulation)
    assert figures == EXPECTED[name]
    assert plan.microbatch * plan.accumulation * plan.dp == job.train.global_batch
    assert plan.predicted["memory_gib"] == pytest.approx(
        sum(plan.predicted[k] for k in ("states_gib", "gathered_gib", "activations_gib", "runtime_gib"))
    )
    assert 0 < plan.predicted["memory_gib"] < 80
    assert plan.predicted["step_time_s"] > 0
    assert Plan.from_json(json.loads(plan.dumps())) == plan


def test_plans_are_made_without_torch() -> None:
    code = (
        "import json, sys\n"
        "from weft.job import parse_job\n"
        "import weft\n"
        "layouts = [weft.plan(parse_job(raw)).layout() for raw in json.load(sys.stdin)]\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "print(json.dumps(layouts))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(THEORY.values())),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == [EXPECTED[name][0] for name in THEORY]


@pytest.mark.parametrize(
    ("world", "parallel", "layout"),
    [
        (8, {"tp": 2}, "dp_shard 4 (zero 3) × tp 2"),
        (8, {"dp_replicate": -1}, "dp_replicate 8"),
        (8, {"dp_replicate": -1, "dp_shard": 2}, "dp_replicate 4 × dp_shard 2 (zero 3)"),
        (8, {"dp_shard": 2, "tp": -1, "zero": 1}, "dp_shard 2 (zero 1) × tp 4"),
        (1, {"dp_shard": -1}, "1 rank"),
        (1, "auto", "1 rank"),
        (4, "auto", "dp_replicate 4"),
        (6, "auto", "dp_replicate 2 × tp 3"),
    ],
)
def test_the_rest_of_the_ranks(world: int, parallel: Any, layout: str) -> None:
    model = {"dim": 48, "heads": 12, "layers": 2, "ffn": 96}
    batch = {"global_batch": 32 if world != 6 else 2}
    job = parse_job({"model": model, "parallel": parallel, "train": batch, "cluster": {"device": "cpu"}})
    _, plan = make_plan(job, world)
    assert (plan.layout(), plan.world) == (layout, world)
    assert parallel != "auto" or world == 1 or plan.reasons


@pytest.mark.parametrize(("recompute", "chunk"), [("auto", 16384), ("full", 16384), ("none", 0), ("selective", 0)])
def test_chunks_that_the_job_leaves_open_follow_its_recompute(recompute: str, chunk: int) -> None:
    """A pinned recompute was refused because of chunks that the planner had chosen itself."""
    job = {
        "model": {"family": "gpt2", "dim": 320, "layers": 1, "heads": 5, "vocab": 257},
        "data": {"source": "synthetic", "seq_len": 131072}, "train": {"global_batch": 4},
        "cluster": {"device": "h100-sxm", "nodes": 1, "devices_per_node": 4}, "memory": {"recompute": recompute},
    }  # fmt: skip
    assert make_plan(parse_job(job))[1].chunk == chunk


def test_a_sequence_that_does_not_divide_stays_whole() -> None:
    def planned(seq_len: int, **parallel: Any) -> Plan:
        job = {"data": {"source": "synthetic", "seq_len": seq_len}, "parallel": {"tp": 2, **parallel}}
        return make_plan(parse_job(job), 2)[1]

    assert planned(8).sequence
    assert not planned(8, sequence=False).sequence
    assert not planned(7).sequence
    assert planned(7).reasons == ("norms keep the whole sequence: data.seq_len 7 does not divide by tp 2",)


@pytest.mark.parametrize(
    "shape",
    [name for name, fields in SHAPES.items() if "experts" not in fields and fields["family"] not in ("resnet", "clip")],
)
def test_counts_are_those_of_the_real_model(shape: str) -> None:
    """405B and all: the model is built on the meta device, where it takes no memory."""
    from weft.models.build_model import build_model

    seq_len = min(2048, SHAPES[shape].get("max_len", 64))
    job = resolve(parse_job({"model": shape, "data": {"source": "synthetic", "seq_len": seq_len}}))
    counted = count_parameters(job.model)
    assert counted is not None
    assert counted.total == sum(p.numel() for p in build_model(job.model).parameters())


@pytest.mark.parametrize(
    "fields",
    [
        {"family": "llama", "tied": True, "qk_norm": True, "kv_heads": 2, "head_dim": 10},
        {"family": "gpt2", "bias": False, "tied": False, "vocab": 51},
        {"family": "gpt2", "norm": "rmsnorm", "activation": "swiglu", "positions": "rope"},
        {"family": "vit", "qk_norm": True, "vocab": 7},
        {"family": "mlp", "bias": False},
    ],
)
def test_counts_of_odd_models(fields: dict[str, Any]) -> None:
    from weft.models.build_model import build_model

    given = {"dim": 24, "layers": 3, **({} if fields["family"] == "mlp" else {"heads": 4}), **fields}
    job = resolve(parse_job({"model": given, "data": {"source": "synthetic", "seq_len": 9}}))
    counted = count_parameters(job.model)
    assert counted is not None
    assert counted.total == sum(p.numel() for p in build_model(job.model).parameters())


def test_published_sizes() -> None:
    def billions(shape: str) -> float:
        counted = count_parameters(resolve(parse_job({"model": shape, "data": {"source": "synthetic"}})).model)
        assert counted is not None
        return round(counted.total / 1e9, 2)

    assert {s: billions(s) for s in ("gpt2", "8b", "70b", "405b", "175b", "mixtral-8x7b", "qwen3-30b-a3b")} == {
        "gpt2": 0.12, "8b": 8.03, "70b": 70.55, "405b": 405.85, "175b": 174.6, "mixtral-8x7b": 46.7,
        "qwen3-30b-a3b": 30.53,
    }  # fmt: skip
    assert billions("deepseek-v3-671b") == pytest.approx(671, rel=0.01)
    assert billions("deepseek-v3-16b") == pytest.approx(15.7, rel=0.02)


def test_flops() -> None:
    """6 for each weight that multiplies a token, and attention's products over half of a causal square."""
    model = resolve(parse_job({"model": "8b", "data": {"source": "synthetic"}})).model
    matrices = 8.03e9 - 128256 * 4096  # the embedding is looked up
    assert flops_per_token(model, 8192) == pytest.approx(6 * matrices + 6 * 32 * 4096 * 8192, rel=1e-3)
    half = {
        "model": {"shape": "8b", "window": 4096, "window_layers": list(range(0, 32, 2))}
    }  # three quarters of a half
    some = resolve(parse_job({**half, "data": {"source": "synthetic", "seq_len": 8192}}))
    assert flops_per_token(some.model, 8192) == pytest.approx(6 * matrices + 6 * 28 * 4096 * 8192, rel=1e-3)
    assert flops_per_sample(model, 10) == 10 * (flops_per_token(model, 10) or 0)
    mlp = resolve(parse_job({"model": "mlp", "data": {"source": "synthetic"}})).model
    assert flops_per_sample(mlp, 128) == 6 * 16 * (256 * 256 + 256)
    assert flops_per_token(resolve(parse_job({"model": "own:Net"})).model, 8) is None


@pytest.mark.parametrize(
    ("words", "section"),
    [
        ("ddp", {"dp_replicate": 2, "dp_shard": 1}),
        ("ddp4", {"dp_replicate": 4, "dp_shard": 1}),
        ("zero1", {"dp_replicate": 1, "dp_shard": 2, "zero": 1}),
        ("zero-2", {"dp_replicate": 1, "dp_shard": 2, "zero": 2}),
        ("dp_shard4 zero3", {"dp_replicate": 1, "dp_shard": 4, "zero": 3}),
        ("zero3 dp_shard4", {"dp_replicate": 1, "dp_shard": 4, "zero": 3}),
        ("dp_shard=4 zero=1", {"dp_replicate": 1, "dp_shard": 4, "zero": 1}),
        ("hsdp zero2", {"dp_replicate": 2, "dp_shard": 2, "zero": 2}),
        ("dp_shard 2 × tp 2", {"dp_replicate": 1, "dp_shard": 2, "tp": 2}),
        ("fsdp4xtp2", {"dp_replicate": 1, "dp_shard": 4, "zero": 3, "tp": 2}),
        ("TP=2", {"dp_replicate": 1, "dp_shard": 1, "tp": 2}),
    ],
)
def test_layouts_as_people_say_them(words: str, section: dict[str, Any]) -> None:
    assert parse_layout(words) == section
    assert ranks(section) == section["dp_replicate"] * section["dp_shard"] * section.get("tp", 1)


def test_lists_of_layouts() -> None:
    assert [name for name, _ in parse_layouts(["ddp2, zero3", "dp_shard=2 tp=2;tp4"])] == [
        "ddp2", "zero3", "dp_shard=2 tp=2", "tp4",
    ]  # fmt: skip
    with pytest.raises(JobError, match=r"'ddp2 tpp' is not a layout: cannot read 'tpp'; names: cp, .* and schedule"):
        parse_layouts(["ddp2 tpp"])
    assert parse_layouts(["tp1"]) == [("tp1", {"dp_replicate": 1, "dp_shard": 1, "tp": 1})]
    for words, says in (
        ("xx", "'xx' is not a layout: it names no axis"),
        ("ddp2, \u00d7", "is not a layout: it names no axis"),
        ("zero", "'zero' names no axis; write for example 'zero3 dp_shard2'"),
        ("zbv", "'zbv' names no axis"),
        ("tp2 pp2 tp4", "'tp2 pp2 tp4' is not a layout: tp is 2 and 4; leave one out"),
    ):  # proven as one rank, which is always the same run, or as the last of two degrees
        with pytest.raises(JobError, match=says):
            parse_layouts([words])
    with pytest.raises(JobError, match=r"no layout is named; write for example --layouts ddp2,zero3"):
        parse_layouts([" , "])


@pytest.mark.parametrize("device", ["t4", "v100"])
def test_bf16_runs_at_the_speed_of_fp32_where_a_device_lacks_it(device: str) -> None:
    job = {
        "model": "gpt2-125m", "data": {"source": "synthetic", "seq_len": 1024}, "train": {"global_batch": 64},
        "cluster": {"device": device, "nodes": 1, "devices_per_node": 8}, "parallel": {"dp_replicate": -1},
    }  # fmt: skip
    made = {name: make_plan(parse_job(job | {"precision": name}))[1] for name in ("auto", "bf16", "fp16", "fp32")}
    seconds = {name: plan.predicted["step_time_s"] for name, plan in made.items()}
    assert made["auto"].precision == "fp16" and "has no bf16 products" in made["auto"].reasons[0]
    assert "precision=fp16 is faster" in made["bf16"].reasons[0]
    assert seconds["auto"] == seconds["fp16"] < 0.4 * seconds["bf16"]
    assert 0.75 < seconds["bf16"] / seconds["fp32"] <= 1  # 16 bits still move fewer bytes
    late = job | {"train": {"global_batch": 64, "sync": "predict"}}  # not with fp16
    assert make_plan(parse_job(late))[1].precision == "bf16"


@pytest.mark.parametrize("memory", [{"states": "8bit"}, {"offload": "states"}])
def test_states_of_modules_are_planned_without_their_sizes(memory: dict[str, Any]) -> None:
    job = {"model": "resnet-18", "data": {"source": "synthetic", "images": {"size": 32}}, "memory": memory}
    plan = make_plan(parse_job(job))[1]
    assert plan.tiered and not plan.homes and not plan.predicted


def test_nothing_is_called_cut_that_stays_whole() -> None:
    from weft.job.load import parse_job
    from weft.planner.describe import describe_plan

    sections = {"data": {"source": "pydoc", "seq_len": 8}, "cluster": {"device": "cpu"}, "parallel": {"tp": 2}}
    module = {**sections, "model": {"module": "helpers.own_models:Plain"}}
    assert "sequence cut" not in describe_plan(*make_plan(parse_job(module), 2))
    assert "sequence cut with tp" in describe_plan(*make_plan(parse_job({**sections, "model": {"shape": "tiny"}}), 2))
