"""`train.sync`: how and how often data-parallel ranks synchronise."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from weft.job.registry import NameIn, Registry
from weft.job.section import Section


@dataclass(frozen=True)
class SyncMode:
    """A way in which data-parallel ranks synchronise. Functions are named as `module:function`."""

    name: str
    fields: tuple[str, ...] = ()
    """The fields of `train.sync` that it uses; others are refused."""
    short_forms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Words that may follow `name:`, and the fields that each sets."""
    period: int = 1
    """Default steps between exchanges."""
    outer: tuple[float, float] = (1.0, 0.0)
    """Default learning rate and momentum of the outer optimizer."""
    start: str = ""
    """Where a mode has processes of its own: trains with them, from (run, job, plan, lock, log) to the exit code."""
    exchange_bytes: str = ""
    """Bytes that a rank sends per step by axis, from (job, plan, parameters on the rank)."""
    rule: str = ""
    """Why it cannot be used with other settings, from (job, plan) to a sentence or None."""

    @property
    def starts_processes(self) -> bool:
        """Whether workers come and go instead of ranks of one mesh."""
        return bool(self.start)

    @property
    def written(self) -> str:
        """How a job names it."""
        if self.short_forms:
            return " or ".join(f"{self.name}:{word}" for word in self.short_forms)
        return f"{self.name}:{self.period}" if self.period > 1 else self.name


SYNC_MODES: Registry[SyncMode] = Registry("train.sync", __name__)

for sync_mode in (
    SyncMode("step"),
    SyncMode("predict", rule="weft.planner.sync:predict_rule"),
    SyncMode("local", ("every", "quantize"), period=8, exchange_bytes="weft.planner.sync:weight_exchange_bytes"),
    SyncMode(  # DiLoCo: Douillard et al. 2023
        "diloco", ("every", "outer_lr", "outer_momentum", "quantize"), period=50, outer=(0.7, 0.9),
        exchange_bytes="weft.planner.sync:weight_exchange_bytes",
    ),
):  # fmt: skip
    SYNC_MODES.register(sync_mode)


def expand(text: str) -> dict[str, Any]:
    """The section of a short form: `local:8`, `diloco:50`, `server:async` or a mode alone."""
    name, sign, rest = text.partition(":")
    mode = SYNC_MODES.get(name)
    if mode is not None and not sign:
        return {"mode": name}
    if mode is not None and rest in mode.short_forms:
        return {"mode": name, **mode.short_forms[rest]}
    if mode is not None and "every" in mode.fields:
        if re.fullmatch(r"\d+", rest):
            return {"mode": name, "every": int(rest)}
        raise ValueError(f"must have a whole number of steps after {name}:, such as {name}:{mode.period}")
    known = ", ".join(mode.written for mode in SYNC_MODES)
    raise ValueError(f"must be one of {known}, or a section such as {{mode: diloco, every: 50, quantize: int8}}")


class Sync(Section):
    """How and how often data-parallel ranks synchronise."""

    mode: Annotated[str, NameIn(SYNC_MODES)] = "step"
    """step (sum gradients in every step), predict (the sum arrives one step late, and until then a linear extrapolation
    of the last two stands in for it), local (local SGD: replicas train independently and average their weights
    periodically), diloco (the same with an outer optimizer), server (workers push gradients to a parameter server and
    pull weights) or federated (clients train on private data, and their updates are averaged)."""
    every: int | None = Field(None, ge=1, le=10**9)
    """Steps between exchanges. Default: 8 (local), 50 (diloco), 1 (federated: each round is then an ordinary training
    step; more steps communicate less, but learn less from the same number of samples)."""
    outer_lr: float | None = Field(None, gt=0)
    """Learning rate of the outer optimizer. Default: 0.7 (diloco), 1 (federated)."""
    outer_momentum: float | None = Field(None, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer. Default: 0.9 (diloco), 0 (federated)."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Quantization of the weight changes that local and diloco exchange."""
    order: Literal["sync", "async"] = "async"
    """Updates of a parameter server: sync waits for all workers in each step, async applies gradients on arrival."""
    servers: int = Field(1, ge=1, le=4096)
    """Number of parameter servers; each holds a shard of the weights."""
    staleness: int = Field(4, ge=0, le=10**6)
    """Maximum staleness of a gradient in updates (async): an update that would leave a worker further behind waits
    until the worker has delivered its gradient or left."""
    gather: int | None = Field(None, ge=1, le=10**6)
    """Gradients per update (async), from any workers. Default: as many as make a global batch."""
    snapshot_every: int = Field(10, ge=1, le=10**9)
    """Updates between the snapshots from which a killed parameter server recovers."""
    clients: int = Field(8, ge=1, le=10**6)
    """Number of clients; the data is divided among them unevenly, by label or topic."""
    sampled: int | None = Field(None, ge=1, le=10**6)
    """Clients sampled for each round. Default: all."""
    skew: float = Field(0.3, gt=0)
    """Concentration of the Dirichlet distribution that divides each label or topic among the clients. Small values are
    uneven; 100 is nearly even."""
    clip: float = Field(0.0, ge=0)
    """Maximum norm of a client's update; 0 turns clipping off."""
    noise: float = Field(0.0, ge=0)
    """Standard deviation of Gaussian noise on the averaged update, as a multiple of clip / clients in the round. With
    noise, clients are weighted equally, and epsilon is printed after each round."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """Delta at which epsilon is computed; well below 1 / clients."""
    secure: bool = False
    """Secure aggregation: clients mask their updates, and the server learns only their sum. Updates are clipped by the
    clients, and tolerance does not apply."""
    min_clients: int | None = Field(None, ge=2, le=10**6)
    """Clients that must complete a round with secure aggregation; with fewer the round is repeated. Default: two thirds
    of the clients in a round."""
    tolerance: float = Field(10.0, gt=1)
    """Reject a client's update if its norm exceeds the median norm of the round by this factor."""
    host: str = "127.0.0.1"
    """Address on which servers listen. The default is reachable from this machine only."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return expand(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_mode(self) -> Sync:
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in ("mode", *self.entry.fields) and value != info.default:
                modes = " and ".join(mode.name for mode in SYNC_MODES if name in mode.fields)
                raise ValueError(f"must not have {name}={value} with mode {self.mode}: it belongs to {modes}")
        if self.sampled is not None and self.sampled > self.clients:
            raise ValueError(f"must not draw sampled={self.sampled} of clients={self.clients}")
        if self.noise and not self.clip:
            raise ValueError(f"must set clip with noise={self.noise:g}, which is a multiple of it; clip=1 works")
        if self.min_clients is not None and not self.secure:
            raise ValueError(f"must not have min_clients={self.min_clients} without secure: true")
        if self.secure and self.drawn < 3:
            raise ValueError(f"must have at least 3 clients in a round with secure: true, not {self.drawn}")
        if self.secure and not self.drawn // 2 < self.quorum <= self.drawn:
            raise ValueError(
                f"must have min_clients from {self.drawn // 2 + 1} to {self.drawn}, the clients in a round, not "
                f"{self.min_clients}"
            )
        if self.secure and self.tolerance != type(self).model_fields["tolerance"].default:
            raise ValueError(f"must not have tolerance={self.tolerance:g} with secure: true: the server sees only sums")
        return self

    @property
    def entry(self) -> SyncMode:
        """The mode's entry."""
        return SYNC_MODES[self.mode]

    @property
    def period(self) -> int:
        """Steps between exchanges."""
        return self.every or self.entry.period

    @property
    def outer(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer optimizer."""
        rate, momentum = self.entry.outer
        return (
            rate if self.outer_lr is None else self.outer_lr,
            momentum if self.outer_momentum is None else self.outer_momentum,
        )

    @property
    def drawn(self) -> int:
        """Clients in a round."""
        return self.sampled or self.clients

    @property
    def quorum(self) -> int:
        """Clients that must complete a round with secure aggregation."""
        return self.min_clients or -(-2 * self.drawn // 3)
