"""Weft's own calibration, adjusted with what `weft calibrate` measured on the same device."""

from __future__ import annotations

from math import inf

from weft.hardware.catalog import Device
from weft.hardware.measured import Measured, MeasuredAttention, load_measured
from weft.job.schema import Job
from weft.planner.calibration import Calibration, load_calibration
from weft.planner.model.cluster_facts import UNKNOWN_TFLOPS, make_cluster
from weft.planner.model.fp8 import fp8_speed
from weft.planner.model.model_facts import ModelFacts
from weft.planner.search.candidates import PRECISIONS, Layouts
from weft.planner.time.compute import ComputeTime, compute_time

LARGE_MESSAGE_BYTES = 1 << 22
"""Bytes from which a message's time is bandwidth rather than latency."""
SUSTAINED = 1.03
"""Time of a step over that of its parts measured alone, on an H200 at its power limit (bench/gpu_memory.py)."""
LIMITS = 0.25, 4.0
"""Of what a block or head may need over what the formulas say."""


def own_calibration(job: Job, device: Device) -> Calibration:
    """Weft's calibration for a job on a device: as shipped, or adjusted with this machine's measurements."""
    shipped, measured = load_calibration("weft"), load_measured(device.name)
    made = shipped if measured is None else with_measurements(shipped, measured, device)
    return made.with_(low_precision=fp8_speed(job))


def with_measurements(shipped: Calibration, measured: Measured, device: Device) -> Calibration:
    """The shipped calibration with the measured values in place."""
    changed: dict[str, float] = {}
    known = device.peak_tflops.get("bf16") or device.peak_tflops.get("fp32")
    reach, most = (known or UNKNOWN_TFLOPS) * device.matmul_share, 1.0 if known else inf
    best = max((p.tflops for p in measured.products if p.dtype in ("bf16", "fp32")), default=0.0)
    if best:
        changed["matmul"] = min(most, best / reach)
        fastest = max((_attention_rate(a) for a in measured.attention), default=0.0)
        changed["attention"] = min(most, fastest / reach) or shipped.attention
    fast = max(measured.copy_gb_s.values(), default=0.0)
    if fast:
        state = 2 * shipped.moment_bytes + 2 * shipped.master_bytes + shipped.gradient_bytes + 2
        changed["optimizer"] = max(0.5, measured.optimizer_ns * fast / state)
    speeds = [
        2 * (m.ranks - 1) / m.ranks * m.bytes / m.seconds / 1e9
        for m in measured.collectives
        if m.kind == "all_reduce" and m.bytes >= LARGE_MESSAGE_BYTES and m.seconds > 0
    ]
    if speeds:
        changed["link"] = min(1.0, max(speeds) / device.link_gb_s)
    made = shipped.with_(**changed, name=f"weft, measured on {measured.product}")
    speed = _block_speed(measured, device, made)
    made = made.with_(matmul=made.matmul * speed, attention=made.attention * speed)
    return made.with_(head_whole=_head_speed(measured, device, made))


def _block_speed(measured: Measured, device: Device, cal: Calibration) -> float:
    """Speed of products and attention with which blocks take the time that was measured, over the calibration's."""
    products = computed = took = 0.0
    for block in measured.blocks:
        facts = ModelFacts(
            layers=1, dim=block.dim, ffn=block.ffn, heads=block.heads, kv_heads=block.kv_heads,
            head_dim=block.head_dim, vocab=0, seq_len=block.seq, gates=2,
        )  # fmt: skip
        without, whole = (
            _computed(facts, device, cal.with_(traffic=traffic), block.batch, block.dtype)
            for traffic in (0.0, cal.traffic)
        )
        products += float((without.forward + without.backward)[0])
        computed += float((whole.forward + whole.backward)[0])
        took += SUSTAINED * (block.forward_s + block.backward_s)
    rest = computed - products  # of memory-bound operations
    return _limited(products / max(took - rest, took / 2)) if took else 1.0


def _head_speed(measured: Measured, device: Device, cal: Calibration) -> float:
    """What the head's products keep, from heads that were measured."""
    computed = took = 0.0
    for head in measured.heads:
        facts = ModelFacts(
            layers=1, dim=head.dim, ffn=head.dim, heads=0, kv_heads=0, head_dim=0, vocab=head.vocab,
            seq_len=head.tokens,
        )  # fmt: skip
        time = _computed(facts, device, cal, 1, head.dtype)
        computed += float((time.head_forward + time.head_backward)[0])
        took += SUSTAINED * head.seconds
    return _limited(computed / took) if took else cal.head_whole


def _computed(facts: ModelFacts, device: Device, cal: Calibration, samples: int, dtype: str) -> ComputeTime:
    """The formulas' times on one device."""
    alone = make_cluster(device, 1, 1, network_gb_s=1.0, latency_us=1.0)
    return compute_time(facts, alone, Layouts.of(microbatch=samples, precision=PRECISIONS.index(dtype)), cal)


def _limited(ratio: float) -> float:
    return min(max(ratio, LIMITS[0]), LIMITS[1])


def _attention_rate(a: MeasuredAttention) -> float:
    """TFLOP/s of causal attention, forward and backward, masked blocks not counted."""
    flops = 3.5 * 2 * a.batch * a.heads * a.head_dim * a.seq * a.seq
    return flops / (a.forward_s + a.backward_s) / 1e12
