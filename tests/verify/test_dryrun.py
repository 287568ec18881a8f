"""Traces of dry runs equal the planner's estimates, and the memory of real ranks."""

from __future__ import annotations

import json
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from weft.cli.main import make_app
from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import parse_layout, ranks
from weft.verify.dryrun import DryRun, dryrun, measured_peak

LLAMA: dict[str, Any] = {"family": "llama", "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab": 200}
GPT2: dict[str, Any] = {"family": "gpt2", "dim": 64, "layers": 2, "heads": 4, "ffn": 256, "vocab": 201}
VIT: dict[str, Any] = {"family": "vit", "dim": 64, "layers": 2, "heads": 4, "ffn": 128, "vocab": 10}
MOE: dict[str, Any] = {
    **LLAMA, "experts": {"count": 4, "ffn": 48, "shared": 1, "aux_weight": 0.1, "balance": "bias", "first_dense": 1}
}  # fmt: skip
T5: dict[str, Any] = {"family": "t5", "dim": 64, "layers": 2, "heads": 4, "ffn": 160, "vocab": 200}
MLP: dict[str, Any] = {"family": "mlp", "dim": 64, "layers": 8}
WIDE, DEEP = {**LLAMA, "kv_heads": 4}, {**LLAMA, "layers": 4}


def make(model: dict[str, Any], layout: str, **sections: Any) -> Job:
    """A job of two microbatches a stage: each is traced, so more would only take longer."""
    section = {"dp_replicate": 1, "dp_shard": 1} if layout == "1" else parse_layout(layout)
    copies = section.get("dp_replicate", 1) * section.get("dp_shard", 1)
    return parse_job(
        {
            "model": model,
            "data": {"source": "synthetic", "seq_len": 32},
            "train": {"global_batch": 2 * copies * 2 * section.get("pp", 1), "microbatch": 2},
            "cluster": {"device": "cpu", "devices_per_node": ranks(section)},
            "parallel": section,
            **sections,
        }
    )


def traced(job: Job, rank: int) -> DryRun:
    found = dryrun(*make_plan(job), rank)
    assert not dist.is_initialized()
    return found


def assert_exact(found: DryRun) -> None:
    for part in ("parameters", "copies", "gradients", "optimizer", "average"):
        assert found.traced[part] == found.estimated[part], part
    assert found.traced["communication"] == found.estimated["communication"]
    assert {(c.axis, c.kind): c.bytes for c in found.collectives} == {
        (c.axis, c.kind): c.estimated_bytes for c in found.collectives
    }


BF16: dict[str, Any] = {"precision": "bf16"}
FULL, SELECTIVE, TWO_BLOCKS = ({"memory": {"recompute": option}} for option in ("full", "selective", 2))
CODED: dict[str, Any] = {"memory": {"activations": "fp8"}}
SGD, MUON, ADAFACTOR, LARS, LAMB = ({"optim": {"name": n}} for n in ("sgd", "muon", "adafactor", "lars", "lamb"))
DOCUMENTS: dict[str, Any] = {"data": {"source": "synthetic", "seq_len": 128, "mask_documents": True}}
ONE: dict[str, Any] = {"train": {"global_batch": 2, "microbatch": 2}}
EMA: dict[str, Any] = {"train": {"global_batch": 12, "microbatch": 2, "ema": 0.9}}
CASES: tuple[tuple[dict[str, Any], str, int, dict[str, Any]], ...] = (
    (LLAMA, "1", 0, {}),
    (LLAMA, "1", 0, BF16 | SELECTIVE | MUON),
    (LLAMA, "1", 0, BF16 | ONE | SGD),
    (LLAMA, "ddp2", 1, BF16 | FULL | SGD),
    (LLAMA, "dp_shard=3 zero1", 2, EMA),
    (GPT2, "dp_shard=3 zero2 tp=2", 3, BF16 | MUON),
    (GPT2, "dp_replicate=2 dp_shard=2 zero3", 3, SGD | TWO_BLOCKS),
    (LLAMA, "zero3 tp=2", 1, FULL | MUON),
    (LLAMA, "zero3 tp=2", 1, CODED | SGD),
    (GPT2, "1", 0, BF16 | CODED),
    (WIDE, "tp=4", 3, BF16 | SELECTIVE | ADAFACTOR),
    (LLAMA, "tp=4", 3, BF16 | SGD),
    ({**LLAMA, "kv_heads": 1, "qk_norm": True}, "zero3 tp=2", 3, FULL),
    ({**GPT2, "layers": 3}, "pp=3 tp=2 dp_shard=2", 9, BF16),
    (GPT2, "pp2 gpipe", 1, SELECTIVE | SGD),
    (DEEP, "pp2 interleaved-1f1b", 0, BF16 | TWO_BLOCKS | ADAFACTOR),
    (LLAMA, "pp2 zbv dp_shard=2", 2, LAMB),
    (LLAMA, "pp2 zb-h1 tp=2", 1, FULL | LARS),
    (DEEP, "pp4 zb-h1", 3, BF16),
    (DEEP, "pp4 zb-h1", 1, SGD),
    ({**DEEP, "layers": 3}, "pp4 zb-h1", 3, BF16 | FULL),
    (GPT2, "pp2 zb-h1 dp_shard=2", 3, {"memory": {"recompute": 2, "activations": "fp8"}}),
    (DEEP, "pp2 dualpipe-v", 1, SGD),
    (WIDE, "dp_shard=2 cp=2 ulysses zero3", 3, FULL),
    (WIDE, "cp=2 tp=2 ulysses", 3, BF16),
    (LLAMA, "dp_shard=2 cp=2 ring zero1", 3, SELECTIVE | SGD),
    (LLAMA, "cp2 ring", 1, BF16 | {"memory": {"recompute": 1}}),
    (T5, "cp=2 ring tp=2", 3, BF16 | FULL),
    (T5, "dp_shard=2 cp=4 hybrid zero3", 3, SGD),
    (MOE, "dp_shard=4 ep=2", 3, SGD),
    (MOE, "dp_shard=2 ep=2 zero1", 1, MUON),
    (MOE, "dp_shard=2 tp=2 ep=4", 1, FULL),
    (MOE, "pp2 tp2 ep2", 3, BF16),
    (VIT, "dp_replicate=2 tp=2", 1, {}),
    (VIT, "dp_shard=3 zero1", 0, CODED),
    (MLP, "pp2 tp2", 3, {}),
    ({**MLP, "layers": 6}, "pp2 tp2", 0, {}),
)
"""Every kind of layout; every optimizer, recompute mode and precision with several of them. bench/memory_matrix.py has
all combinations."""


@cache
def traced_case(index: int) -> DryRun:
    model, layout, rank, sections = CASES[index]
    return traced(make(model, layout, **sections), rank)


def peak_error(found: DryRun) -> float:
    return found.estimated["peak_memory"] / found.traced["peak_memory"] - 1


@pytest.mark.parametrize("index", range(len(CASES)), ids=[layout for _, layout, _, _ in CASES])
def test_trace_equals_estimate(index: int) -> None:
    found = traced_case(index)
    assert_exact(found)
    if "cp" not in CASES[index][1]:
        assert found.traced["flops"] == pytest.approx(found.estimated["flops"], rel=0.01)
    assert abs(peak_error(found)) < 0.08


def test_median_error_of_the_peak() -> None:
    assert median(abs(peak_error(traced_case(index))) for index in range(len(CASES))) < 0.03


LATENT = {"head_dim": 24, "rope_dim": 8, "latent": {"q_rank": 32, "kv_rank": 16, "v_dim": 16}}
BERT: dict[str, Any] = {"family": "bert", "dim": 64, "layers": 2, "heads": 4, "ffn": 128, "vocab": 200}
PARTS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({**LLAMA, "norm_at": "both", "dropout": 0.1}, FULL),
    ({**LLAMA, "activation": "swiglu_clamped", "sinks": True}, {}),
    ({**LLAMA, "activation": "relu", "window": 16}, {}),
    ({**LLAMA, "sinks": True, "window": 16, "window_layers": [0]}, {}),
    ({**LLAMA, "sinks": True}, {"data": {"source": "synthetic", "seq_len": 2560}}),
    ({**LLAMA, "vocab": 20_000}, {"data": {"source": "synthetic", "seq_len": 4}}),
    ({**LLAMA, "lora": {"rank": 2}}, {}),
    ({**LLAMA, "lora": {"rank": 2}}, SELECTIVE),
    ({**GPT2, "parallel_residual": True}, {}),
    (BERT, {}),
    ({**LLAMA, "head_dim": 64, "experts": {"count": 4, "ffn": 48, "top_k": 1}}, {}),
    ({**WIDE, **LATENT}, {}),
    (T5, {}),
    (T5, FULL),
    (T5, {**SELECTIVE, "precision": "fp32"}),
)
"""Parts of models that keep tensors of their own, alone on a rank; of a large vocabulary, the copy in bf16; of many
scores, tiles."""
LONG: dict[str, Any] = {"data": {"source": "synthetic", "seq_len": 256}, "train": {"global_batch": 2}}


@pytest.mark.parametrize(("model", "sections"), PARTS)
def test_peak_of_parts_of_models(model: dict[str, Any], sections: dict[str, Any]) -> None:
    assert abs(peak_error(traced(make(model, "1", **{**BF16, **LONG, **sections}), 0))) < 0.05


def test_peak_of_long_pairs_over_context() -> None:
    """Scores of all keys, which cp cuts by queries or by heads, in fp32 too."""
    for layout, precision in (("cp=2 ring", {}), ("cp=4 ulysses", BF16)):
        assert abs(peak_error(traced(make(T5, layout, **precision, **LONG), 1))) < 0.08


@pytest.mark.parametrize(
    ("layout", "compression", "dim"),
    [
        ("ddp2", "int4", 256), ("zero2", "topk:0.01", 256), ("zero3", "int8", 64), ("ddp2", "fp16", 64),
        ("hsdp", "int8", 64), ("pp2 dp_shard=2 zero3", "int4", 64), ("pp2 zb-h1 dp_shard=2", "threshold:3", 64),
    ],
)  # fmt: skip
def test_peak_with_compressed_gradients(layout: str, compression: str, dim: int) -> None:
    """What a step does not send is held beside that of the step before, messages have temporary tensors, and sums
    of shards wait for the last microbatch where shards have replicas."""
    raw = {**BF16, **SGD, "data": {"source": "synthetic", "seq_len": 16}, "comm": {"compression": compression}}
    found = traced(make({**LLAMA, "dim": dim, "vocab": 2000 if dim > 64 else 200}, layout, **raw), 0)
    assert abs(peak_error(found)) < 0.06
    assert found.traced["communication"] == pytest.approx(found.estimated["communication"], rel=0.01)


@pytest.mark.parametrize(
    ("model", "layout", "sections"),
    [
        (T5, "pp2 zb-h1", BF16 | CODED), (LLAMA, "pp2 zb-h1", BF16 | CODED),
        (GPT2, "pp2 zb-h1", BF16 | {"memory": {"recompute": 1, "activations": "fp8"}}),
    ],
)  # fmt: skip
def test_peak_of_the_last_stage_of_split_passes(model: dict[str, Any], layout: str, sections: dict[str, Any]) -> None:
    """Cross attention and the norm before it wait for the gradients of weights too; nothing is held after them."""
    assert abs(peak_error(traced(make(model, layout, **sections), 1))) < 0.06


TOKENS: dict[str, Any] = {"data": {"source": "synthetic", "seq_len": 128}}
TWO_SAMPLES: dict[str, Any] = {"train": {"global_batch": 4, "microbatch": 2}}
WIDE_TABLE: dict[str, Any] = {"vocab": 2048}


@pytest.mark.parametrize(
    ("model", "layout", "rank", "sections"),
    [
        ({**DEEP, "kv_heads": 4}, "pp2 zbv tp=2", 0, BF16 | TOKENS | TWO_SAMPLES),  # no room is needed for a forward
        (DEEP, "pp2 zbv", 0, BF16 | TOKENS | TWO_BLOCKS),  # one stage of the rank splits its backward pass
        (VIT, "cp2 ring", 0, BF16 | TOKENS | CODED),  # whole chunks, not halves
        (GPT2 | WIDE_TABLE, "pp2 dp_shard=2 zero1", 3, BF16 | {"train": {"global_batch": 4, "microbatch": 1}}),
        (T5 | WIDE_TABLE, "pp2 gpipe", 0, {}),  # gradients of the table by source and target
    ],
)
def test_peak_of_stages_and_chunks(model: dict[str, Any], layout: str, rank: int, sections: dict[str, Any]) -> None:
    """FSDP2 frees a unit's weights before it reduces its gradients, of which it holds the last meanwhile."""
    assert abs(peak_error(traced(make(model, layout, **sections), rank))) < 0.055


@pytest.mark.parametrize(
    ("model", "layout"), [({**LLAMA, "kv_heads": 1}, "tp=2"), (WIDE, "cp=2 tp=2 ulysses")],
)  # fmt: skip
def test_chunked_blocks(model: dict[str, Any], layout: str) -> None:
    """They project again in the backward pass, which passes into regions of cut matrices once more."""
    found = traced(make(model, layout, **BF16, memory={"chunk": 16}, data={"source": "synthetic", "seq_len": 64}), 0)
    assert_exact(found)
    assert abs(peak_error(found)) < 0.06


def test_documents_under_context_parallelism() -> None:
    """Which chunks see which depends on values; a dry run has none and takes all of them."""
    job = make(LLAMA, "cp2 ring", data={"source": "synthetic", "seq_len": 32, "mask_documents": True})
    assert_exact(traced(job, 1))


def test_peak_with_masks_of_documents() -> None:
    """They are freed after the forward pass."""
    assert abs(peak_error(traced(make(DEEP, "pp2 zbv", **DOCUMENTS), 0))) < 0.05


def test_large_worlds() -> None:
    raw = {
        "model": {**LLAMA, "layers": 4, "dim": 1024, "heads": 16, "kv_heads": 8},
        "data": {"source": "synthetic", "seq_len": 256},
        "train": {"global_batch": 512, "microbatch": 1},
        "cluster": {"device": "h100-sxm", "nodes": 512, "devices_per_node": 8},
        "parallel": {"pp": 4, "dp_shard": 128, "zero": 3, "tp": 8},
    }
    found = traced(parse_job(raw), 1234)
    assert (found.world, found.position) == (4096, "pp1 dp_shard26 tp2")
    assert_exact(found)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(JobError, match=r"--rank 2 is not one of the 2 ranks; 0 to 1 are"):
        traced(make(LLAMA, "ddp2"), 2)


def test_a_module_of_a_persons_own() -> None:
    """Its states and sums are counted to the byte, as they are for Weft's models; what a layout would need to know of
    values is refused."""
    data = {"source": "pydoc", "seq_len": 32}
    for layout, axis, kinds in (
        ("zero3", "dp_shard", {"all_gather", "reduce_scatter", "all_reduce"}),
        ("ddp2", "dp_replicate", {"all_reduce"}),
    ):
        found = traced(make({"module": "helpers.own_models:InPlace"}, layout, data=data), 1)
        assert found.traced.keys() == found.estimated.keys()
        assert found.traced["parameters"] == found.estimated["parameters"] > 0
        assert found.traced["flops"] == found.estimated["flops"] > 0
        assert {(c.axis, c.kind) for c in found.collectives} == {(axis, kind) for kind in kinds}
        assert 0.5 < found.estimated["peak_memory"] / found.traced["peak_memory"] < 2
    with pytest.raises(JobError, match=r"no values of tensors, without which model.module=.*ReadsValues cannot be"):
        traced(make({"module": "helpers.own_models:ReadsValues"}, "ddp2", data=data), 0)


def test_json_output() -> None:
    done = CliRunner().invoke(make_app(), ["dryrun", "tiny", "--world", "4", "--rank", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["world"], found["rank"]) == (4, 3)
    assert found["traced"]["parameters"] == found["estimated"]["parameters"]
    assert {c["kind"] for c in found["collectives"]} >= {"all_gather", "reduce_scatter"}


EVEN = {**MOE, "experts": {**MOE["experts"], "top_k": 4}}  # every token to every expert: no rank is sent more
DENSE = ["1", "ddp2", "zero1", "zero2", "zero3", "hsdp", "tp2", "dp_shard=2 tp=2", "pp2", "pp2 dp_shard=2"]


@pytest.mark.parametrize(("layout", "experts"), [*((layout, None) for layout in DENSE), ("dp_shard=4 ep=2", EVEN)])
def test_peak_memory_of_real_ranks(pool: RankPool, layout: str, experts: dict[str, Any] | None) -> None:
    model = {**(experts or LLAMA), "dim": 128, "ffn": 352, "layers": 3}
    job = make(model, layout, train={"global_batch": 8, "microbatch": 1})
    _, plan = make_plan(job)
    predicted = plan.predicted
    seen = max(pool.run(measured_peak, plan.world, job))
    assert (predicted["memory_gib"] - predicted["runtime_gib"]) * 2**30 == pytest.approx(seen, rel=0.06)
