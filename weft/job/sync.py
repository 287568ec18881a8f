"""`train.sync`: how often, and through whom, the parts of a run that read different samples come together."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from weft.job.section import Section

Mode = Literal["step", "local", "diloco", "server", "federated"]

MODES: dict[str, str] = {
    "step": "step",
    "local": "local:8",
    "diloco": "diloco:50",
    "server": "server:async or server:sync",
    "federated": "federated",
}
"""Each mode, and how it is written in short."""

PERIODS: dict[str, int] = {"local": 8, "diloco": 50, "federated": 1}
"""Steps between exchanges where a person gives none."""

OUTER: dict[str, tuple[float, float]] = {"local": (1.0, 0.0), "diloco": (0.7, 0.9), "federated": (1.0, 0.0)}
"""Rate and momentum of the outer step where a person gives none (DiLoCo: Douillard et al. 2023)."""

OF_MODE: dict[str, tuple[str, ...]] = {
    "every": ("local", "diloco", "federated"),
    "outer_lr": ("diloco", "federated"),
    "outer_momentum": ("diloco", "federated"),
    "quantize": ("local", "diloco"),
    "order": ("server",),
    "servers": ("server",),
    "staleness": ("server",),
    "gather": ("server",),
    "snapshot_every": ("server",),
    "clients": ("federated",),
    "sampled": ("federated",),
    "skew": ("federated",),
    "clip": ("federated",),
    "noise": ("federated",),
    "tolerance": ("federated",),
    "host": ("server", "federated"),
}
"""Which modes read which field: elsewhere it would be passed over in silence."""


def expand(text: str) -> dict[str, Any]:
    """`local:8`, `diloco:50`, `server:async` or a mode alone, as a section."""
    mode, sign, rest = text.partition(":")
    if mode in MODES and not sign:
        return {"mode": mode}
    if mode in PERIODS and re.fullmatch(r"\d+", rest):
        return {"mode": mode, "every": int(rest)}
    if mode == "server" and rest in ("sync", "async"):
        return {"mode": mode, "order": rest}
    known = ", ".join(MODES.values())
    if mode in PERIODS:
        raise ValueError(f"must have a whole number of steps after {mode}:, such as {mode}:{PERIODS[mode]}")
    raise ValueError(f"must be one of {known}, or a section such as {{mode: diloco, every: 50, quantize: int8}}")


class Sync(Section):
    """How often, and through whom, ranks that read different samples come together."""

    mode: Mode = "step"
    """step (gradients are summed in every step), local (replicas train alone and average their weights now and then),
    diloco (the same with an outer optimizer), server (workers push gradients to a parameter server and pull weights) or
    federated (clients with private data train a while, and their updates are averaged)."""
    every: int | None = Field(None, ge=1)
    """Steps between exchanges. Left out: 8 (local), 50 (diloco), 1 (federated: each round is then a step of ordinary
    training; more steps send less and learn less from as many samples)."""
    outer_lr: float | None = Field(None, gt=0)
    """Rate of the outer step. Left out: 0.7 (diloco), 1 (federated)."""
    outer_momentum: float | None = Field(None, ge=0, lt=1)
    """Nesterov momentum of the outer step. Left out: 0.9 (diloco), 0 (federated)."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """What travels at an exchange of local and diloco: the way that each replica went, as it is or in so few bits."""
    order: Literal["sync", "async"] = "async"
    """Of a parameter server: sync waits for every share of a step, async takes gradients as they come."""
    servers: int = Field(1, ge=1)
    """Parameter servers, among which the weights are dealt out."""
    staleness: int = Field(4, ge=0)
    """Updates by which the weights that a gradient was computed with may be old (async); no update is made that would
    leave a worker further behind, until it has delivered or is gone."""
    gather: int | None = Field(None, ge=1)
    """Gradients that make one update (async), whoever sent them. Left out: as many as make a global batch."""
    snapshot_every: int = Field(10, ge=1)
    """Updates between the snapshots from which a parameter server starts again after it was killed."""
    clients: int = Field(8, ge=1)
    """Clients among which the data is dealt out unevenly, by its labels or topics."""
    sampled: int | None = Field(None, ge=1)
    """Clients drawn for each round. Left out: all."""
    skew: float = Field(0.3, gt=0)
    """How uneven the clients' data is: the concentration of a Dirichlet draw for each label or topic. Small is uneven;
    100 is nearly even."""
    clip: float = Field(0.0, ge=0)
    """Largest norm of a client's update; 0 does not clip."""
    noise: float = Field(0.0, ge=0)
    """Gaussian noise on the averaged update, as a multiple of clip divided by the clients in the round."""
    tolerance: float = Field(10.0, gt=1)
    """A client's update is rejected if its norm exceeds the round's median norm so many times."""
    host: str = "127.0.0.1"
    """Address at which servers listen. Only this machine reaches the default."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return expand(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _belongs(self) -> Sync:
        for name, modes in OF_MODE.items():
            value = getattr(self, name)
            if self.mode not in modes and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"must not have {name}={value} with mode {self.mode}: it belongs to {' and '.join(modes)}"
                )
        if self.sampled is not None and self.sampled > self.clients:
            raise ValueError(f"must not draw sampled={self.sampled} of clients={self.clients}")
        if self.noise and not self.clip:
            raise ValueError(
                f"must have clip beside noise={self.noise:g}, whose size is a multiple of it; clip=1 works"
            )
        return self

    @property
    def period(self) -> int:
        """Steps between exchanges."""
        return self.every or PERIODS.get(self.mode, 1)

    @property
    def outer(self) -> tuple[float, float]:
        """Rate and momentum of the outer step."""
        rate, momentum = OUTER.get(self.mode, (1.0, 0.0))
        return (
            rate if self.outer_lr is None else self.outer_lr,
            momentum if self.outer_momentum is None else self.outer_momentum,
        )

    @property
    def drawn(self) -> int:
        """Clients in a round."""
        return self.sampled or self.clients

    @property
    def words(self) -> str:
        """The mode in short, such as `diloco every 50`."""
        if self.mode in PERIODS:
            return f"{self.mode} every {self.period}"
        return f"{self.order} server" if self.mode == "server" else self.mode
