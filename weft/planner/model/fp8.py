"""Which products of a model run in fp8, and the reference peak of an fp8 run."""

from __future__ import annotations

from fnmatch import fnmatchcase

from weft.job.schema import Job
from weft.planner.engine_constants import FP8_ALIGNMENT
from weft.planner.model.counts import flops_per_token
from weft.planner.plan import Plan

FP8_SPEED = {"delayed": 0.80, "dynamic": 0.66}
"""Share of its peak that fp8 reaches with casts and scales, over the share that bf16 reaches, by where the scales come
from; measured on an H200 (bench/gpu_memory.py)."""


def stays_bf16(name: str, rows: int, columns: int, skip: tuple[str, ...]) -> bool:
    """Whether a linear layer stays in bf16: listed in fp8.skip, or its sizes are not aligned."""
    return bool(rows % FP8_ALIGNMENT or columns % FP8_ALIGNMENT) or any(fnmatchcase(name, pattern) for pattern in skip)


def delayed_scales(job: Job) -> bool:
    """Whether fp8 scales are computed from previous steps."""
    if job.fp8.amax == "auto":
        return job.fp8.scaling == "tensorwise" and job.train.sync.mode == "step"
    return job.fp8.amax == "delayed"


def fp8_head_blocks(job: Job) -> int:
    """Aligned blocks of rows of a head in fp8; tp must divide them. 0 for a head that stays in bf16."""
    m = job.model
    rows, columns = m.vocab or 0, m.dim or 0
    predicts = (m.is_decoder or m.is_encoder_decoder) and not m.labels_samples and not m.has_head_bias
    low = job.fp8.head and predicts and not stays_bf16("head", rows, columns, tuple(job.fp8.skip))
    return rows // FP8_ALIGNMENT if low else 0


def head_in_fp8(job: Job, tp: int) -> bool:
    """Whether the head multiplies in fp8."""
    blocks = fp8_head_blocks(job)
    return blocks > 0 and blocks % tp == 0


def fp8_share(job: Job, plan: Plan) -> float | None:
    """The share of the model's FLOPs in fp8; None for a custom module."""
    model = job.model
    flops = flops_per_token(model, job.data.seq_len)
    if plan.precision != "fp8" or flops is None:
        return None if flops is None else 0.0
    weights, _ = fp8_weights(job, plan.tp)
    if head_in_fp8(job, plan.tp):
        weights += (model.vocab or 0) * (model.dim or 0)
    return 6.0 * weights / flops


def fp8_weights(job: Job, tp: int) -> tuple[int, int]:
    """Block weights multiplied in fp8, and all block weights."""
    skip, low, every = tuple(job.fp8.skip), 0, 0
    for i in range(job.model.layers or 0):
        for path, rows, columns, cut in _linears(job, i):
            cut_rows, cut_columns = (rows // tp, columns) if cut == "column" else (rows, columns // tp)
            sizes = (rows, columns) if cut == "whole" else (cut_rows, cut_columns)
            low += 0 if stays_bf16(path, *sizes, skip) else rows * columns
            every += rows * columns
    return low, every


def fp8_speed(job: Job) -> float:
    """The share of FP8_SPEED that applies to a job."""
    return FP8_SPEED["delayed" if delayed_scales(job) else "dynamic"]


def _linears(job: Job, i: int) -> list[tuple[str, int, int, str]]:
    """Path, outputs, inputs and cut of each linear layer of a block."""
    m = job.model
    dim = m.dim or 0
    if m.is_stack:
        pairs = (m.layers or 0) // 2
        return [(f"layers.{i}", dim, dim, ("column", "row")[i % 2] if i < 2 * pairs else "whole")]
    heads, kv, ffn = (m.heads or 0) * (m.head_dim or 0), (m.kv_heads or 0) * (m.head_dim or 0), m.ffn or 0
    gate = [("mlp.gate", ffn, dim, "column")] if m.gated else []
    parts = [
        ("attn.q", heads, dim, "column"), ("attn.k", kv, dim, "column"), ("attn.v", kv, dim, "column"),
        ("attn.o", dim, heads, "row"), *gate, ("mlp.up", ffn, dim, "column"), ("mlp.down", dim, ffn, "row"),
    ]  # fmt: skip
    return [(f"blocks.{i}.{name}", rows, columns, cut) for name, rows, columns, cut in parts]


def blended_peak(fp8: float, bf16: float, share: float) -> float:
    """Peak of a mix of fp8 and bf16 products: FLOPs over the least possible time."""
    return 1.0 / (share / fp8 + (1.0 - share) / bf16)
