"""Health of a GPU: which errors and limits are new since the last look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft.hardware.nvml_device import GpuSample, NvmlDevice

HOT_MARGIN_C = 3.0
"""Degrees below the slow-down temperature from which a GPU counts as hot."""
THROTTLE_SAMPLES = 3
"""Samples in a row after which a limit is reported."""
XID_MEANINGS = {
    13: "a kernel used memory wrongly", 31: "a kernel accessed an invalid address", 48: "memory has a double-bit error",
    63: "a memory row is remapped", 64: "a memory row could not be remapped", 74: "an NVLink failed",
    79: "the GPU has fallen off the bus", 94: "a contained memory error", 95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
}  # fmt: skip
ERRORS = {
    "ecc_uncorrected": "memory errors that ECC could not correct", "ecc_corrected": "memory errors, corrected by ECC",
    "nvlink": "errors of its NVLinks",
}  # fmt: skip
LIMITS = {
    "power": "lowers its clock because of its power limit", "thermal": "lowers its clock because it is too hot",
    "hardware": "lowers its clock because the hardware signals an emergency",
}  # fmt: skip


@dataclass
class GpuHealth:
    """Remembers counters and states of a GPU, and reports each change once."""

    device: NvmlDevice
    report: Callable[[str, str], None]
    """Called with a kind (ecc, xid, nvlink, throttle, overheat) and a sentence."""
    samples: int = 0
    throttled: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))
    """Samples in which each limit was active."""
    _row: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))
    _counters: dict[str, int] | None = None
    _hot: bool = False

    def look(self, sample: GpuSample) -> None:
        """Compare a sample and the error counters with the last ones."""
        self.samples += 1
        for kind, sentence in (*self._limits(sample), *self._temperature(sample), *self._errors()):
            self.report(kind, f"GPU {self.device.index} {sentence}")

    def share(self, kind: str) -> float:
        """Share of the samples in which a limit was active."""
        return self.throttled[kind] / self.samples if self.samples else 0.0

    def _limits(self, sample: GpuSample) -> Iterator[tuple[str, str]]:
        for kind, meaning in LIMITS.items():
            active = kind in sample.throttled
            self.throttled[kind] += active
            self._row[kind] = self._row[kind] + 1 if active else 0
            lowered = self.device.limit_is_lowered() if kind == "power" else True
            if self._row[kind] == THROTTLE_SAMPLES and lowered:  # under full load every GPU reaches its own limit
                clock = "" if sample.clock_share is None else f", to {100 * sample.clock_share:.0f} % of the highest"
                yield "throttle", meaning + clock

    def _temperature(self, sample: GpuSample) -> Iterator[tuple[str, str]]:
        limit = self.device.slowdown_c
        if sample.celsius is None or limit is None:
            return
        hot = sample.celsius >= limit - HOT_MARGIN_C
        if hot and not self._hot:
            yield "overheat", f"is at {sample.celsius:.0f} °C; it slows down at {limit:.0f} °C"
        self._hot = hot

    def _errors(self) -> Iterator[tuple[str, str]]:
        for xid in self.device.new_xids():
            yield "xid", f"reports XID {xid}: {XID_MEANINGS.get(xid, 'see the XID list of NVIDIA')}"
        now = self.device.error_counters()
        for name, count in now.items() if self._counters is not None else ():
            new = count - (self._counters or {}).get(name, 0)
            if new > 0:
                yield name.split("_")[0], f"has {new} new {ERRORS[name]}"
        self._counters = now
