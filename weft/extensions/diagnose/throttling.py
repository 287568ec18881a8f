"""Thermal and power throttling, from the health events of the devices."""

from __future__ import annotations

from weft.extensions.diagnose.evidence import RunEvidence
from weft.extensions.diagnose.finding import Finding, percent

MIN_SHARE = 0.1
"""Share of the samples in which a device was throttled, from which it is reported."""
FIXES = {
    "power": "raise the power limit (watch.power_cap_w, nvidia-smi -pl) if the device and its supply allow it",
    "thermal": "check fans, air flow and the temperature of the inlet; a lower watch.power_cap_w keeps clocks steady",
    "hardware": "check the power supply and its cables, and the device's own limits (nvidia-smi -q -d PERFORMANCE)",
}


def throttling(found: RunEvidence) -> Finding | None:
    """A GPU lowers its clock because of heat or a power limit."""
    table = found.table
    if table is None:
        return None
    shares = {kind: table.get(f"throttled_{kind}")[-1] for kind in FIXES}  # of all samples since the start
    kind = max(shares, key=lambda k: float(shares[k].max()))
    rank = int(shares[kind].argmax())
    share = float(shares[kind][rank])
    if share < MIN_SHARE:
        return None
    watts, clock = (float(table.get(k)[:, rank].mean()) for k in ("gpu_power_w", "gpu_clock_share"))
    evidence = (
        f"the GPU of rank {rank} lowers its clock in {percent(share)} of the samples ({kind} limit); it draws "
        f"{watts:.0f} W at {percent(clock)} of its highest clock"
    )
    cost = 100 * share * (1 - clock) if 0 < clock < 1 else None
    return Finding("throttling", evidence, FIXES[kind], rank, cost)
