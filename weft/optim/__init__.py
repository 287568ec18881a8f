"""Optimizers, learning-rate schedules, one clip that is right in every layout, a moving average of the weights."""

from weft.optim.build import Optimizers, build_optimizers
from weft.optim.clip import grad_norm
from weft.optim.ema import Ema
from weft.optim.schedule import peak_lr, rate

__all__ = ["Ema", "Optimizers", "build_optimizers", "grad_norm", "peak_lr", "rate"]
