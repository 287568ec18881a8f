"""The energy of a run: measured where there are counters, estimated elsewhere, with CO2 and cost."""

from __future__ import annotations

from dataclasses import dataclass, field

CORE_WATTS = 6.0
"""Power of a busy processor core, where there is no counter: server processors have 5 to 8 W a core at full load."""
MEMORY_WATTS_PER_GIB = 0.375
"""3 W for a module of 8 GiB."""
NETWORK_JOULES_PER_BYTE = 1e-9
"""An adapter of 400 Gb/s (25 W) and its port of a switch (20 W) at full rate."""
JOULES_PER_KWH = 3.6e6
PARTS = ("devices", "processors", "processors (estimated)", "memory (estimated)", "network (estimated)")


@dataclass(frozen=True)
class StepEnergy:
    """What one step used."""

    seconds: float
    tokens: float
    device_j: float
    """Measured on GPUs."""
    host_j: float
    """Measured on processors."""
    cpu_s: float
    """Processor time of ranks on machines without a counter."""
    memory_gib: float
    """Memory of ranks on machines whose counters do not include it."""
    sent_bytes: float
    """Bytes that ranks sent to other machines."""


@dataclass
class EnergyAccount:
    """Sums over the steps of a run."""

    co2_g_per_kwh: float
    usd_per_hour: float | None
    """Price of all devices; None where it is not known."""
    measured_j: float = 0.0
    estimated_j: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    by_part: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def resume(self, kwh: float, measured_share: float) -> None:
        """Continue from what the run has used before."""
        self.measured_j = kwh * JOULES_PER_KWH * measured_share
        self.estimated_j = kwh * JOULES_PER_KWH * (1 - measured_share)

    def add(self, step: StepEnergy) -> None:
        used = {
            "devices": step.device_j, "processors": step.host_j, "processors (estimated)": step.cpu_s * CORE_WATTS,
            "memory (estimated)": step.memory_gib * MEMORY_WATTS_PER_GIB * step.seconds,
            "network (estimated)": step.sent_bytes * NETWORK_JOULES_PER_BYTE,
        }  # fmt: skip
        for part, joules in used.items():
            self.by_part[part] += joules
        self.measured_j += step.device_j + step.host_j
        self.estimated_j += sum(used.values()) - step.device_j - step.host_j
        self.seconds += step.seconds
        self.tokens += step.tokens

    @property
    def joules(self) -> float:
        return self.measured_j + self.estimated_j

    def metrics(self) -> dict[str, float]:
        """Fields of metrics.jsonl: totals of the run so far, and the mean power and tokens a joule since it started."""
        here = sum(self.by_part.values())
        if not self.seconds or not here:
            return {}
        kwh = self.joules / JOULES_PER_KWH
        found = {
            "power_w": round(here / self.seconds, 2), "energy_kwh": float(f"{kwh:.6g}"),
            "energy_measured_share": round(self.measured_j / self.joules, 4),
            "co2_g": float(f"{kwh * self.co2_g_per_kwh:.5g}"), "tokens_per_joule": float(f"{self.tokens / here:.5g}"),
        }  # fmt: skip
        if self.usd_per_hour is not None:
            found["cost_usd"] = float(f"{self.usd_per_hour * self.seconds / 3600:.5g}")
        return found
