"""`watch`: progress, metrics, trackers and alerts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from weft.job.registry import NameIn, Registry, listed
from weft.job.section import Section


@dataclass(frozen=True)
class TrackerKind:
    """An experiment tracker."""

    name: str
    help: str
    package: str
    """The module that must be installed."""
    builder: str
    """`module:class` of the adapter."""
    export: str = ""
    """`module:function` of (run, job, tracker, out) that sends a finished run; returns steps and place. Empty: only
    live runs."""


TRACKERS: Registry[TrackerKind] = Registry("watch.trackers", __name__)


@dataclass(frozen=True)
class AlertTargetKind:
    """Where alerts can go."""

    name: str
    """The key of an entry of `watch.alerts.to` that chooses it; its value is the address."""
    help: str
    send: str
    """`module:function` of (target, message) that raises OSError with the reason if it fails."""
    describe: Callable[[AlertTarget], str]
    """The target without its secrets."""
    check: Callable[[AlertTarget], str | None] = lambda target: None
    """What the target must be instead, or None."""


ALERT_TARGETS: Registry[AlertTargetKind] = Registry("watch.alerts.to", __name__)

AlertRuleName = Literal["non_finite", "spike", "stalled", "slow", "goodput", "disk", "gpu_errors", "finished"]


class AlertTarget(Section):
    """Where alerts go: the name of one registered kind with an address, such as command, webhook or mail. $NAME in a
    value is replaced by the environment variable, so that secrets need not be in the job."""

    command: str = ""
    """A program and its arguments. It is started for every alert with the alert as JSON on stdin and in the variables
    WEFT_ALERT_RULE, WEFT_ALERT_TEXT, WEFT_ALERT_RUN and WEFT_ALERT_STEP. No shell is used."""
    webhook: str = ""
    """An http or https address that takes a POST with JSON."""
    shape: Literal["json", "slack", "feishu", "dingtalk"] = "json"
    """Form of the webhook's JSON: Weft's own, or that of a chat."""
    mail: str = ""
    """An e-mail address."""
    smtp: str = "smtp://localhost:25"
    """Mail server: smtp://HOST:PORT (STARTTLS if it is offered) or smtps://HOST:PORT, with USER@ before HOST to log in
    with the password of WEFT_SMTP_PASSWORD."""
    sender: str = ""
    """Address of the sender; weft@ this host if empty."""
    other: dict[str, str] = Field(default_factory=dict)
    """The kind and address of a target that an extension registers, such as {pager: "…"}. `{pager: "…"}` alone in
    `to` means the same."""

    @model_validator(mode="before")
    @classmethod
    def _registered_kinds(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = [key for key in value if key not in cls.model_fields and key in ALERT_TARGETS]
        if not names:
            return value
        rest = {key: inner for key, inner in value.items() if key not in names}
        return {**rest, "other": {**rest.get("other", {}), **{key: value[key] for key in names}}}

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in ALERT_TARGETS if self.address(kind.name)]
        if len(given) != 1:
            raise ValueError(f"must have exactly one of {listed(ALERT_TARGETS.names(), 'and')}")
        if (instead := given[0].check(self)) is not None:
            raise ValueError(instead)
        return self

    def address(self, kind: str) -> str:
        """The address for a kind of target; empty if it is not this target's."""
        return str(getattr(self, kind, "")) or self.other.get(kind, "")

    @property
    def kind(self) -> AlertTargetKind:
        """The kind of this target."""
        return next(kind for kind in ALERT_TARGETS if self.address(kind.name))


class Alerts(Section):
    """Messages about a run, sent by a process of their own. None is sent unless `to` is given."""

    to: list[AlertTarget] = Field(default_factory=list)
    """Where to, such as [{webhook: "https://…", shape: slack}, {mail: me@example.org}]."""
    rules: list[AlertRuleName] = Field(default_factory=lambda: list(get_args(AlertRuleName)))
    """What is reported: non-finite loss or gradient, a loss spike, no step for a long time, steps slower than before,
    a low share of time in steps, a disk that is nearly full, errors of a GPU, and the end of the run."""
    stalled_s: float = Field(300.0, gt=0)
    """stalled: seconds without a step; at least 20 times the usual step time."""
    slow_percent: float = Field(30.0, gt=0)
    """slow: how much longer recent steps take than the run's usual ones, in percent."""
    goodput_below: float = Field(0.5, gt=0, lt=1)
    """goodput: least share of the time since the start that new steps took; judged after ten minutes."""
    disk_percent: float = Field(95.0, gt=0, lt=100)
    """disk: used share of the disk of the run folder, in percent."""
    repeat_s: float = Field(3600.0, ge=0)
    """Seconds before the same alert is sent again."""
    per_hour: int = Field(30, ge=1, le=10_000)
    """Most messages in an hour; the number of those held back is in the next one."""


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
    tracker_metrics: Literal["main", "all"] = "main"
    """Metrics that trackers receive, as train/…, val/… and system/…: the main ones (losses, metrics, gradient norm,
    learning rate, speed, memory), or all, with every figure of communication, ranks, devices, energy and experts."""
    prometheus: int | str | None = None
    """Metrics for Prometheus: a port on this machine, HOST:PORT, or a file *.prom for the textfile collector of
    node_exporter."""
    alerts: Alerts = Alerts()
    """Messages when something goes wrong, and when the run ends."""

    @field_validator("trackers")
    @classmethod
    def _once(cls, value: list[str]) -> list[str]:
        if twice := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f"must name each tracker once, not {twice} twice")
        return value

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
