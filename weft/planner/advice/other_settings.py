"""Speed-up of settings that the job does not use: fp8 (fp16 for slow bf16), gradient compression and offload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.planner.search.branch_and_bound import LayoutSearch, SearchResult
from weft.planner.search.candidates import Layouts

SETTINGS = (
    ("precision", "precision", "fp8"), ("precision", "precision", "fp16"), ("compression", "comm.compression", "bf16"),
    ("compression", "comm.compression", "int8"), ("offload", "memory.offload", "activations"),
)  # fmt: skip
MIN_GAIN = 0.01
"""Smaller gains are not reported."""


@dataclass(frozen=True)
class Gain:
    """A setting, and the speed-up of a step with it."""

    setting: str
    step_time_s: float
    peak_gib: float
    faster: float

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting, "step_time_s": self.step_time_s, "peak_memory_gib": self.peak_gib,
            "faster": self.faster,
        }  # fmt: skip


def gains_of_other_settings(search: LayoutSearch, found: SearchResult) -> list[Gain]:
    """Search again with the best layout's degrees and each setting in turn; the largest gain first."""
    one: Layouts = found.layouts.take([0])
    device = found.estimator.cluster.device
    gains = []
    for name, key, value in SETTINGS:
        if name == "precision" and (device is None or not device.peak_tflops.get(value)):
            continue
        if value == "fp16" and not ("bf16" in search.space.precision and device is not None and device.emulates_bf16):
            continue
        if value in getattr(search.space, name):
            continue
        if name == "compression" and int(one.ep[0]) > 1:  # refused (planner/rules/communication_rules.py)
            continue
        same: dict[str, Any] = {axis: (int(getattr(one, axis)[0]),) for axis in ("pp", "tp", "cp", "ep")}
        other = LayoutSearch(search.space.restricted(**same, **{name: (value,)}), found.estimator).find()
        if len(other) and other.times[0] < (1 - MIN_GAIN) * found.times[0]:
            seconds = float(other.times[0])
            gains.append(Gain(f"{key}={value}", seconds, float(other.peaks[0]), float(found.times[0]) / seconds - 1))
    return sorted(gains, key=lambda gain: -gain.faster)
