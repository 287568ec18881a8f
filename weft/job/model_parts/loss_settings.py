"""`model.loss`: the losses that a job may name, and one of several."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from weft.job.registry import did_you_mean, listed
from weft.job.section import Section

LOSSES = ("auto", "model", "cross_entropy", "nll", "bce", "mse", "l1", "smooth_l1", "contrastive")
"""Losses that a job may name (weft/models/user/named_losses.py)."""


class NamedLoss(Section):
    """One of several losses of your own module."""

    function: str = "auto"
    """auto, cross_entropy, nll, bce, mse, l1, smooth_l1, or a package.module:function of (output, target) that returns
    one loss per target or per sample."""
    output: str | None = None
    """Name of the output, as your module names it. Default: the name of this loss; of the only output, it may be left
    out."""
    target: str | None = None
    """Name of the target, as your dataset names it. Default: the name of this loss; of the only target, it may be left
    out."""
    weight: float = Field(1.0, gt=0)
    """Factor on this loss in the sum of all."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @field_validator("function")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in ("model", "contrastive"):
            raise ValueError(f"must be a loss of one output and one target, not {value}, which is a model.loss alone")
        return check_loss(value)


def check_loss(value: str) -> str:
    """The name of a loss, or a ValueError with what it must be."""
    if value not in LOSSES and ":" not in value:
        raise ValueError(f"must be {listed((*LOSSES, 'a package.module:function'))}{did_you_mean(value, LOSSES)}")
    return value
