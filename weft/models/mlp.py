"""The deep MLP of the lessons: many square layers and a regression target."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model


class DeepMLP(nn.Module):
    """Square linears with a GELU between them. With targets it returns the squared error: a sample's mean, summed."""

    units = "layers.*"

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.layers
        self.layers = nn.ModuleList(nn.Linear(m.dim, m.dim, bias=bool(m.bias)) for _ in range(m.layers))

    @property
    def parts(self) -> dict[str, str]:
        """Layers in pairs, cut by column then by row; the last of an odd number stays whole."""
        pairs = len(self.layers) // 2
        return {f"layers.{i}": ("column", "row")[i % 2] for i in range(2 * pairs)}

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, valid: Tensor | None = None, keys: Tensor | None = None,
        smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        x = inputs  # [batch, dim]
        for i, layer in enumerate(self.layers):
            x = layer(F.gelu(x) if i else x)
        if targets is None:
            return x
        error = (x.float() - targets.float()).square().mean(-1)
        return error.sum() if valid is None else (error * valid).sum()
