"""`model.lora`: low-rank adapters that are trained instead of the model's own weights."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import Field, field_validator

from weft.job.section import Section

LAYERS = ("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a", "kv_b")
"""Names of the linear layers of a block; the last four are those of latent attention."""

FEED_FORWARD = ("gate", "up", "down")


class Lora(Section):
    """Low-rank adapters (Hu et al. 2021): the model's weights are frozen, and each chosen linear layer adds
    alpha / rank · B · A of its input, of which A and B are trained."""

    rank: int = Field(8, ge=1, le=65_536)
    """Rank of the adapters."""
    alpha: float = Field(16.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability at the input of an adapter; the masks are the same in every layout."""
    targets: tuple[str, ...] | Literal["all"] = "all"
    """Linear layers with an adapter, such as [q, v] of q, k, v, o, gate, up and down (q_a, q_b, kv_a and kv_b in latent
    attention); q_proj is another name of q. Default: all of them, in models with experts those of attention. Experts
    that tokens are routed to have none."""

    @field_validator("targets", mode="before")
    @classmethod
    def _plain_names(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = "all" if value in ("all", "all-linear") else value.split(",")
        if not isinstance(value, list | tuple):
            return value
        names = [str(name).strip().removesuffix("_proj") for name in value]
        for name in names:
            if name not in LAYERS:
                near = difflib.get_close_matches(name, LAYERS, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; layers are {', '.join(LAYERS)}"
                raise ValueError(f"must name linear layers of a block, and {name!r} is none{hint}")
        if not names:
            raise ValueError("must name at least one layer, such as [q, v]")
        return tuple(dict.fromkeys(names))

    @property
    def scale(self) -> float:
        """Factor on the output of an adapter."""
        return self.alpha / self.rank

    def applies_to(self, layer: str, experts: bool) -> bool:
        """Whether a linear layer of a block, by the last part of its name, has an adapter in a model with experts or
        without; transformers' q_proj is q."""
        layer = layer.removesuffix("_proj")
        if self.targets == "all":
            return layer in LAYERS and not (experts and layer in FEED_FORWARD)
        return layer in self.targets
