"""Weft's own calibration, adjusted with what `weft calibrate` measured on the same device."""

from __future__ import annotations

from weft.hardware.catalog import Device
from weft.hardware.measured import Measured, MeasuredAttention, load_measured
from weft.planner.calibration import Calibration, load_calibration

LARGE_MESSAGE_BYTES = 1 << 22
"""Bytes from which a message's time is bandwidth rather than latency."""


def own_calibration(device: Device) -> Calibration:
    """Weft's calibration for a device: as shipped, or adjusted with this machine's measurements."""
    shipped, measured = load_calibration("weft"), load_measured(device.name)
    return shipped if measured is None else with_measurements(shipped, measured, device)


def with_measurements(shipped: Calibration, measured: Measured, device: Device) -> Calibration:
    """The shipped calibration with the measured values in place."""
    changed: dict[str, float] = {}
    peak = device.peak_tflops.get("bf16") or device.peak_tflops.get("fp32")
    best = max((p.tflops for p in measured.products if p.dtype in ("bf16", "fp32")), default=0.0)
    if peak and best:
        changed["matmul"] = min(1.0, best / (peak * device.matmul_share))
        rates = [_attention_rate(a) for a in measured.attention]
        changed["attention"] = min(1.0, max(rates, default=0.0) / (peak * device.matmul_share))
        changed["attention"] = changed["attention"] or shipped.attention
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
    return shipped.with_(**changed, name=f"weft, measured on {measured.product}")


def _attention_rate(a: MeasuredAttention) -> float:
    """TFLOP/s of causal attention, forward and backward, masked blocks not counted."""
    flops = 3.5 * 2 * a.batch * a.heads * a.head_dim * a.seq * a.seq
    return flops / (a.forward_s + a.backward_s) / 1e12
