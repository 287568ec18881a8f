"""Pieces: weights that are updated together, cut out of a model's units in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.shards import like, local_of
from weft.optim.build_optimizers import Optimizers, Params, hollow

ROW_ALIGNMENT = 16
"""Rows at which a weight may be cut: a multiple of the vectors that kernels process, so that cutting changes no bit."""
Home = str
"""device, host or disk."""


@dataclass(frozen=True)
class WeightSlice:
    """A weight, or some of its rows."""

    name: str
    first: int = 0
    end: int | None = None
    """None: the whole weight."""

    @property
    def key(self) -> str:
        return self.name if self.end is None else f"{self.name}[{self.first}:{self.end}]"

    def of(self, tensor: Tensor) -> Tensor:
        """Its rows of a tensor."""
        return tensor if self.end is None else tensor[self.first : self.end]


@dataclass(eq=False)
class StreamedTensor:
    """A state of a piece that is copied to the device for an update and back."""

    holder: dict[str, Any]
    """Where the optimizer looks for it."""
    key: str
    part: WeightSlice
    kind: str
    """Its name in the optimizer, `low` or `ema`."""
    shape: tuple[int, ...]
    """On this rank."""
    dtype: torch.dtype
    placed_as: Tensor | None = None
    """A DTensor whose placements it has; None: it is a plain tensor."""
    host: Tensor | None = None
    """Its values at home; None: on disk."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def bind(self, values: Tensor) -> None:
        """Make the optimizer work on these values."""
        self.holder[self.key] = values if self.placed_as is None else like(values, self.placed_as)


@dataclass(eq=False)
class Piece:
    """Weights that are updated together, with an optimizer of their own."""

    unit: str
    slices: list[WeightSlice]
    optimizers: Optimizers
    homes: dict[str, Home]
    averages: dict[str, Any] = field(default_factory=dict)
    """The moving averages by key, where the run has them."""
    streamed: list[StreamedTensor] = field(default_factory=list)
    disk: list[StreamedTensor] = field(default_factory=list)
    """Those of them that live on disk."""
    stored: Any = None
    """Event at the end of the last copy from the device."""


def cut_slices(
    names: Iterable[str], params: Params, cuttable: Callable[[str], bool], limit: int
) -> list[list[WeightSlice]]:
    """Weights packed into pieces of at most `limit` elements; larger ones are cut by rows where they can be."""
    pieces: list[list[WeightSlice]] = [[]]
    filled = 0

    def put(part: WeightSlice, size: int) -> None:
        nonlocal filled
        if pieces[-1] and filled + size > limit:
            pieces.append([])
            filled = 0
        pieces[-1].append(part)
        filled += size

    for name in names:
        local = local_of(params[name])
        size = local.numel()
        row = size // max(1, local.shape[0]) if local.dim() else 1
        step = max(ROW_ALIGNMENT, limit // max(1, row) // ROW_ALIGNMENT * ROW_ALIGNMENT)
        if size <= limit or local.dim() < 2 or not cuttable(name) or step >= local.shape[0]:
            put(WeightSlice(name), size)
            continue
        for first in range(0, local.shape[0], step):
            end = min(first + step, local.shape[0])
            put(WeightSlice(name, first, end), (end - first) * row)
    return [piece for piece in pieces if piece]


def slice_params(
    part: WeightSlice, master_params: Params, grad_params: Params, compute_params: Params, split: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The master weight of a slice, the tensor with its gradient, and its compute weight."""
    master, leaf, compute = (some.get(part.name) for some in (master_params, grad_params, compute_params))
    assert master is not None and leaf is not None
    if part.end is None:
        return master, leaf, compute
    rows = part.of(master.detach())
    own = nn.Parameter(hollow(rows) if split else rows, requires_grad=master.requires_grad)
    view = None if compute is None else nn.Parameter(part.of(compute.detach()), requires_grad=compute.requires_grad)
    return own, own if leaf is master or view is None else view, view


def assign_homes(sizes: dict[str, int], shares: dict[Home, float]) -> dict[str, Home]:
    """The home of each weight's states: the shares of bytes, spread evenly over the weights; the rest on the device."""
    owed = dict.fromkeys(shares, 0.0)
    out: dict[str, Home] = {}
    for name, size in sizes.items():
        for home, share in shares.items():
            owed[home] += share * size
        best = max(owed, key=lambda home: owed[home], default="device")
        if not owed or owed[best] < size / 2:
            out[name] = "device"
        else:
            out[name] = best
            owed[best] -= size
    return out


def zero_state(optimizers: Optimizers) -> None:
    """Create the states of an optimizer as they are before its first step."""
    optimizers.allocate()
    for part in optimizers.parts:
        for state in part.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    with torch.no_grad():
                        local_of(value).zero_()
