"""Which products of a model run in fp8, and the reference peak of an fp8 run."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod

from weft.job.schema import Job
from weft.planner.engine_constants import FP8_ALIGNMENT
from weft.planner.model.counts import flops_per_token
from weft.planner.model.weight_table import Weight, weights_of
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
    predicts = (m.continues_text or m.has_source) and not m.labels_samples and not m.has_head_bias
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
    passes = 4.0 if model.lora is not None else 6.0  # frozen weights get no gradient
    return passes * weights / flops


def fp8_weights(job: Job, tp: int) -> tuple[int, int]:
    """Block weights multiplied in fp8, and all of the linear layers of blocks."""
    model, skip, low, every = job.model, tuple(job.fp8.skip), 0, 0
    for weight in weights_of(model, False, 0, model.layers or 0, False, False):
        if not _is_linear(weight):
            continue
        rows, columns = weight.on_tp(tp, 0)
        size = prod(weight.shape)
        low += 0 if stays_bf16(weight.name.removesuffix(".weight"), rows, columns, skip) else size
        every += size
    return low, every


def _is_linear(weight: Weight) -> bool:
    """Whether a linear layer of a block has this weight: not an adapter, a router or routed experts."""
    others = weight.experts or ".lora." in weight.name or ".router." in weight.name
    return weight.in_block and len(weight.shape) == 2 and not others


def fp8_speed(job: Job) -> float:
    """The share of FP8_SPEED that applies to a job."""
    return FP8_SPEED["delayed" if delayed_scales(job) else "dynamic"]


def blended_peak(fp8: float, bf16: float, share: float) -> float:
    """Peak of a mix of fp8 and bf16 products: FLOPs over the least possible time."""
    return 1.0 / (share / fp8 + (1.0 - share) / bf16)
