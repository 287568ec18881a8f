"""Step time on one device, interpolated from measurements of Weft's blocks, loss, optimizer and host."""

from __future__ import annotations

from math import exp, log, prod

from weft.hardware.measured import Measured, MeasuredAttention, MeasuredBlock, MeasuredProduct
from weft.job.schema import Job
from weft.planner.model.fp8 import cast_bytes, fp8_speedup, fp8_weights, head_in_fp8
from weft.planner.model.parameters import stage_weights
from weft.planner.plan import Plan
from weft.planner.time.traffic import gradients_stay_low_precision


def step_seconds(job: Job, plan: Plan, measured: Measured) -> float | None:
    """Seconds of one step on one device; None where the measurements do not cover the layout."""
    m = job.model
    if plan.world > 1 or not m.is_decoder or not measured.blocks or not measured.heads:
        return None
    tokens = plan.microbatch * job.data.seq_len
    scale = _matched(job, plan, measured)
    fp8 = plan.precision == "fp8" and plan.device != "cpu"
    ahead = sum(product_seconds(measured, "bf16" if fp8 else plan.precision, tokens, k, n) for k, n in _matrices(job))
    casts = 0.0
    if fp8:
        low, every = fp8_weights(job, plan.tp)
        ahead *= 1 - low / every * (1 - 1 / fp8_speedup(plan))
        casts = low / every * cast_bytes(job, tokens) / (measured.copy_gb_s[max(measured.copy_gb_s, key=int)] * 1e9)
    back = 2 * ahead
    forward, backward = attention_seconds(job, plan, measured)
    rest = elementwise_bytes(job, plan.microbatch * job.data.seq_len)
    again = plan.recomputed(0, m.layers or 1, m.layers or 1) / (m.layers or 1)
    kept = plan.recompute == "selective"  # only what is neither a matrix product nor attention is recomputed
    once = (1 if kept else 1 + again) * (ahead + forward) + (1 + again) * rest / 3 / scale
    coding = 2 * saved_bytes(job, tokens) * (1 - again) / scale if plan.activations == "fp8" else 0.0
    block = once + back + backward + 2 * rest / 3 / scale + casts + coding
    head = _head_seconds(job, plan, measured)
    parameters = sum(prod(w.shape) for w in stage_weights(m, plan, 0))
    fastest = max(measured.copy_gb_s.values()) * 1e9
    summed = (
        0 if gradients_stay_low_precision(plan) or plan.precision == "fp32" else 4 + (2 + 4 + 4) * plan.accumulation
    )
    norm = 2 if gradients_stay_low_precision(plan) else 4
    update = parameters * (measured.optimizer_ns * 1e-9 + (summed + norm) / fastest)
    return plan.accumulation * ((m.layers or 0) * block + head) + update


def _matrices(job: Job) -> list[tuple[int, int]]:
    """[in, out] of each matrix of a block."""
    m = job.model
    dim, ffn, hd = m.dim or 0, m.ffn or 0, m.head_dim or 0
    heads, kv = (m.heads or 0) * hd, (m.kv_heads or 0) * hd
    gates = 2 if m.gated else 1
    return [(dim, heads), (dim, kv), (dim, kv), (heads, dim), *[(dim, ffn)] * gates, (ffn, dim)]


def product_seconds(measured: Measured, dtype: str, m: float, k: float, n: float) -> float:
    """A product's time: its FLOPs at the speed of the measured ones nearest in shape."""
    points = [p for p in measured.products if p.dtype == dtype] or list(measured.products)

    def distance(p: MeasuredProduct) -> float:
        return log(p.m / m) ** 2 + log(p.k / k) ** 2 + log(p.n / n) ** 2

    near = sorted(points, key=distance)[:4]
    weights = [1 / (distance(p) + 1e-3) for p in near]
    speed = exp(sum(w * log(p.tflops) for w, p in zip(weights, near, strict=True)) / sum(weights))
    return 2 * m * k * n / (speed * 1e12)


def attention_seconds(job: Job, plan: Plan, measured: Measured) -> tuple[float, float]:
    """Forward and backward of a block's attention, at the speed measured for the nearest length and width."""
    m = job.model
    seq, width = job.data.seq_len, m.head_dim or 1

    def distance(a: MeasuredAttention) -> float:
        return log(a.seq / seq) ** 2 + 4 * log(a.head_dim / width) ** 2

    near = min(measured.attention, key=distance)
    products = plan.microbatch * (m.heads or 0) * width * seq * seq
    ratio = products / (near.batch * near.heads * near.head_dim * near.seq * near.seq)
    return near.forward_s * ratio, near.backward_s * ratio


def elementwise_bytes(job: Job, tokens: float) -> float:
    """Bytes that a block's norms, rotations, gates and additions read and write, forward and backward."""
    m = job.model
    dim, ffn = m.dim or 0, m.ffn or 0
    turned = ((m.heads or 0) + (m.kv_heads or 0)) * (m.head_dim or 0)
    rope = 96.0 * turned if m.positions == "rope" else 0.0
    gates = (2 + 3 + 6 + 3) * 2.0 * ffn if m.gated else (2 + 3) * 2.0 * ffn
    return tokens * (rope + gates + (2 * 2 + 2 * 3 + 2 * 4 + 4 * 3) * 2.0 * dim)


def saved_bytes(job: Job, tokens: float) -> float:
    """Bytes read and written when the saved activations of a block are encoded in fp8, or decoded."""
    m = job.model
    width = m.head_dim or 0
    elements = 4 * (m.dim or 0) + 2 * ((m.heads or 0) + (m.kv_heads or 0)) * width + 2 * (1 + m.gated) * (m.ffn or 0)
    return tokens * elements * 3.0


def _matched(job: Job, plan: Plan, measured: Measured) -> float:
    """Bytes a second of the element-wise work, from what is left of a measured block besides its products."""
    nearest = min(
        measured.blocks, key=lambda b: log(b.dim / (job.model.dim or 1)) ** 2 + log(b.seq / job.data.seq_len) ** 2
    )
    other = _as_job(job, nearest)
    like = Plan("cuda", measured.name, "nccl", microbatch=nearest.batch, precision=nearest.dtype)
    products = 3 * sum(
        product_seconds(measured, nearest.dtype, nearest.batch * nearest.seq, k, n) for k, n in _matrices(other)
    )
    attention = sum(attention_seconds(other, like, measured))
    left = nearest.forward_s + nearest.backward_s - products - attention
    fastest = max(measured.copy_gb_s.values()) * 1e9
    bytes_ = elementwise_bytes(other, nearest.batch * nearest.seq)
    return min(2 * fastest, bytes_ / left) if left > 0 else 2 * fastest


def _as_job(job: Job, block: MeasuredBlock) -> Job:
    shape = {k: getattr(block, k) for k in ("dim", "heads", "kv_heads", "head_dim", "ffn")}
    model = job.model.model_copy(update={**shape, "activation": "swiglu", "positions": "rope"})
    return job.model_copy(update={"model": model, "data": job.data.model_copy(update={"seq_len": block.seq})})


def _head_seconds(job: Job, plan: Plan, measured: Measured) -> float:
    m = job.model
    dim, vocab = m.dim or 1, m.vocab or 1
    near = min(measured.heads, key=lambda h: log(h.vocab / vocab) ** 2 + log(h.dim / dim) ** 2)
    ratio = plan.microbatch * job.data.seq_len * dim * vocab / (near.tokens * near.dim * near.vocab)
    return near.seconds * ratio / (fp8_speedup(plan) if plan.precision == "fp8" and head_in_fp8(job, plan.tp) else 1.0)
