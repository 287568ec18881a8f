"""Low-rank adapters (Hu et al. 2021): y = W x + scale · B A x, of which A and B are trained and W is frozen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.shards import local_of
from weft.job.model_parts.lora_settings import Lora
from weft.models.attention import TokenInfo
from weft.models.dropout import Dropout

SITE_DISTANCE = 1 << 20
"""Between the dropout sites of a block's adapters; the sites of all blocks are below."""


class Adapter(nn.Module):
    """The product B A of one linear layer. Under tensor parallelism a rank holds a part of A or of B, and the product
    is the same part of the output, or a part of its sum."""

    tokens: TokenInfo | None = None
    """The tokens of the layer's input, which determine the dropout mask; set by the block where there is dropout."""

    def __init__(self, lora: Lora, inputs: int, outputs: int, site: int):
        super().__init__()
        self.scale, self.first = lora.scale, 0
        """`first` is the index of this rank's first input."""
        self.a = nn.Parameter(torch.empty(lora.rank, inputs))
        self.b = nn.Parameter(torch.empty(outputs, lora.rank))
        self.drop = Dropout(lora.dropout, site)

    def forward(self, x: Tensor) -> Tensor:
        if self.drop.p and self.training and self.tokens is not None:
            x = self.drop(x, self.tokens.keys, self.tokens.rows, self.first)
        return F.linear(F.linear(x, local_of(self.a)), local_of(self.b)) * self.scale


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter, its submodule `lora`."""

    def forward(self, x: Tensor) -> Tensor:
        return adapted(self, x, super().forward(x))


def adapted(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The output of a linear layer, with that of its adapter if it has one."""
    adapter = getattr(layer, "lora", None)
    return y if adapter is None else y + adapter(x)


def add_adapters(model: nn.Module, lora: Lora, experts: bool = False) -> None:
    """Freeze a model of Weft's own, with experts or without, and give linear layers of its blocks adapters."""
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        found: list[Adapter] = []
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear) and lora.applies_to(name.rpartition(".")[2], experts):
                layer.__class__ = AdaptedLinear
                layer.lora = Adapter(lora, layer.in_features, layer.out_features, SITE_DISTANCE * (len(found) + 1))
                found.append(layer.lora)
        if lora.dropout:
            block.adapters = tuple(found)  # a tuple, so that they are not registered a second time


def initialise_adapter(leaf: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill A or B in place, as PEFT does: B is zero, so that training starts from the model itself."""
    if leaf == "b":
        tensor.zero_()
    else:
        bound = tensor.shape[1] ** -0.5  # He et al. 2015 with a slope of √5, the default of torch's linear layers
        tensor.uniform_(-bound, bound, generator=generator)
