"""Thermal and power throttling, from the health events of the devices."""

from __future__ import annotations

from weft.watch.diagnose.evidence import RunEvidence, number
from weft.watch.diagnose.finding import Finding, percent

MIN_SHARE = 0.1
"""Share of the samples in which a device was throttled, from which it is reported."""
FIXES = {
    "power": "raise the power limit (watch.power_cap_w, nvidia-smi -pl) if the device and its supply allow it",
    "thermal": "check fans, air flow and the temperature of the inlet; a lower watch.power_cap_w keeps clocks steady",
    "hardware": "check the power supply and its cables, and the device's own limits (nvidia-smi -q -d PERFORMANCE)",
}


def throttling(found: RunEvidence) -> Finding | None:
    """A device lowers its clock because of heat or a power limit."""
    worst: tuple[float, dict[str, object]] | None = None
    for record in reversed(found.records):
        devices = record.get("devices")
        if isinstance(devices, list):  # the newest figures include all samples since the start
            for device in devices:
                if isinstance(device, dict):
                    share = max((number(device.get(f"throttled_{kind}")) or 0.0 for kind in FIXES), default=0.0)
                    worst = max(worst or (0.0, device), (share, device), key=lambda pair: pair[0])
            break
    if worst is None or worst[0] < MIN_SHARE:
        return None
    share, device = worst
    kind = max(FIXES, key=lambda k: number(device.get(f"throttled_{k}")) or 0.0)
    watts, limit, clock = (number(device.get(k)) for k in ("watts", "limit_w", "clock_share"))
    more = f"; it draws {watts:.0f} of {limit:.0f} W" if watts is not None and limit is not None else ""
    more += f" at {percent(clock)} of its highest clock" if clock is not None else ""
    rank = number(device.get("rank"))
    evidence = f"GPU {device.get('index')} lowers its clock in {percent(share)} of the samples ({kind} limit){more}"
    cost = 100 * share * (1 - clock) if clock is not None else None
    return Finding("throttling", evidence, FIXES[kind], None if rank is None else int(rank), cost)
