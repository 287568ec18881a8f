"""`watch`: progress and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, field_validator

from weft.job.alerts import Alerts
from weft.job.registry import NameIn, Registry
from weft.job.section import Section


@dataclass(frozen=True)
class TrackerKind:
    """An experiment tracker."""

    name: str
    help: str
    package: str
    """The module that must be installed."""
    builder: str
    """`module:class` of the adapter, see weft/watch/trackers/adapter.py."""


TRACKERS: Registry[TrackerKind] = Registry("watch.trackers", "weft.watch.trackers.registry")


class TracedSteps(Section):
    """Steps of which a trace of all ranks is written to RUN/traces."""

    at: int = Field(100, ge=1, le=10**12)
    """First traced step."""
    steps: int = Field(3, ge=1, le=1000)
    """Number of traced steps."""


class Watch(Section):
    """Progress, metrics and the report."""

    every: int = Field(10, ge=1, le=10**12)
    """Steps between progress lines."""
    gantt_step: int = Field(5, ge=0, le=10**12)
    """Step of a pipelined run whose time line is recorded for the report; 0 turns this off."""
    comm_every: int = Field(10, ge=0, le=10**12)
    """Steps between measurements of communication: its share of the step, how much is not overlapped, its bandwidth. 0
    turns this off."""
    trace: TracedSteps | None = None
    """Steps to trace, such as {at: 100, steps: 3}. The file of all ranks is RUN/traces/steps-100-102.json."""
    nvtx: bool = False
    """Mark the parts of every step as NVTX ranges, for Nsight. Traced steps are marked in any case."""
    power_cap_w: float | None = Field(None, gt=0, le=10_000)
    """Power limit of each GPU during the run, in watts; needs root. The limit that was set before is restored."""
    co2_g_per_kwh: float = Field(473.0, ge=0, le=10_000)
    """Grams of CO2 for a kilowatt-hour where the run is. Default: the world's mean of 2024 (Ember)."""
    trackers: list[Annotated[str, NameIn(TRACKERS)]] = Field(default_factory=list)
    """Experiment trackers that receive metrics, job, plan, events and report: tensorboard, wandb, mlflow, trackio. A
    process of its own feeds them; metrics.jsonl is always written."""
    prometheus: int | str | None = None
    """Metrics for Prometheus: a port on this machine, HOST:PORT, or a file *.prom for the textfile collector of
    node_exporter."""
    alerts: Alerts = Alerts()
    """Messages when something goes wrong, and when the run ends."""

    @field_validator("prometheus")
    @classmethod
    def _port_or_file(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str) and not value.endswith(".prom"):
            host, _, port = value.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError("must be a port, HOST:PORT or a file that ends in .prom")
        if isinstance(value, int) and not 0 < value < 65536:
            raise ValueError("must be a port from 1 to 65535, HOST:PORT or a file that ends in .prom")
        return value
