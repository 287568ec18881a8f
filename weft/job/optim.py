"""`optim`: the optimizer and its learning rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section


class Optim(Section):
    """The optimizer and its learning rate over time."""

    name: Literal["adamw", "sgd", "adafactor", "muon"] = "adamw"
    """adamw, sgd with momentum, adafactor, or muon (muon on the blocks' matrices, adamw on the rest)."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's running means."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd and muon."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices, apart from the gradient (sgd adds it to the gradient, as torch does). Vectors never decay."""
    clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the rate falls after warm-up; wsd is warm-up, stable, decay."""
    warmup: float = Field(0.02, ge=0)
    """Warm-up: below 1 a share of all steps, from 1 up a number of steps."""
    min_lr: float = Field(0.1, ge=0, le=1)
    """Where cosine, linear and wsd end, as a share of lr."""
    decay: float = Field(0.2, gt=0, le=1)
    """Share of all steps in which wsd decays, at the end."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr with train.global_batch / base_batch."""
    base_batch: int = Field(256, ge=1)
    """The global batch for which lr was chosen (scale_lr)."""

    @field_validator("betas")
    @classmethod
    def _decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("must be two numbers from 0 to below 1, such as [0.9, 0.95]")
        return value
