"""A model family of a user's own: the deep MLP with residual connections."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from weft.job.model import FAMILIES, Family
from weft.models.mlp import DeepMLP


class ResidualMLP(DeepMLP):
    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, **unused: Any) -> Tensor:
        x, layers = inputs, list(self.layers)
        for up, down in zip(layers[::2], layers[1::2], strict=True):
            x = x + down(F.gelu(up(x)))
        return ((x.float() - targets).square().mean(-1) * valid).sum()


FAMILIES.register(Family("residual-mlp", "A residual MLP.", f"{__name__}:ResidualMLP", "stack", {"bias": True}))
