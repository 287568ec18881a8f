"""`optim`: the optimizer and the learning-rate schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section


class Optim(Section):
    """The optimizer and the learning-rate schedule."""

    name: Literal["adamw", "sgd", "adafactor", "muon"] = "adamw"
    """adamw, sgd with momentum, adafactor, or muon (muon on the blocks' matrices, adamw on the rest)."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon in AdamW's denominator."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd and muon."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices (sgd adds it to the gradient, as torch does). Vectors are not decayed."""
    clip: float = Field(1.0, ge=0)
    """Maximum norm of the global gradient; 0 turns clipping off."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning-rate schedule after the warm-up; wsd is warmup-stable-decay."""
    warmup: float = Field(0.02, ge=0)
    """Warm-up steps; a value below 1 is a fraction of all steps."""
    min_lr: float = Field(0.1, ge=0, le=1)
    """Final learning rate of cosine, linear and wsd, as a fraction of lr."""
    decay: float = Field(0.2, gt=0, le=1)
    """Fraction of all steps, at the end, in which wsd decays."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr with train.global_batch / base_batch."""
    base_batch: int = Field(256, ge=1)
    """Global batch for which lr was chosen (scale_lr)."""

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("must be two numbers from 0 to below 1, such as [0.9, 0.95]")
        return value
