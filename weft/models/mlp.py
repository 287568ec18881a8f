"""The deep MLP of the lessons: many square layers and a regression target."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model


class DeepMLP(nn.Module):
    """Square linear layers with GELU between them. With targets it returns the summed mean squared error of samples."""

    units = "layers.*"

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.layers
        self.dim, self.depth, self.ends = m.dim, m.layers, True
        self.layers = nn.ModuleList(nn.Linear(m.dim, m.dim, bias=bool(m.bias)) for _ in range(m.layers))

    @property
    def parts(self) -> dict[str, str]:
        """Layers in pairs, sharded by column then by row; the last of an odd number is not sharded."""
        pairs = self.depth // 2
        return {f"layers.{i}": ("column", "row")[i % 2] for i in range(2 * pairs)}

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, valid: Tensor | None = None, keys: Tensor | None = None,
        smoothing: float = 0.0, hidden: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        x = inputs if hidden is None else hidden  # [batch, dim]
        for name, layer in self.layers.named_children():
            x = layer(F.gelu(x) if name != "0" else x)
        if targets is None or not self.ends:
            return x
        error = (x.float() - targets.float()).square().mean(-1)
        return error.sum() if valid is None else (error * valid).sum()

    def keep(self, first: int, last: int, begins: bool, ends: bool) -> None:
        """Keep only layers first … last - 1, and the loss if `ends`; names do not change."""
        for i in range(self.depth):
            if not first <= i < last:
                delattr(self.layers, str(i))
        self.ends = ends

    def hidden_shape(self, batch: dict[str, Tensor], sequence_cut: int) -> tuple[int, ...]:
        """Shape of the activations between stages."""
        return batch["inputs"].shape[0], self.dim
