"""Pieces: weights that are updated together, cut out of a model's units in the order of the forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm.shards import like, local_of
from weft.job.optim import OPTIMIZERS, WeightShard
from weft.job.schema import Optim
from weft.memory.split_master import hollow
from weft.mesh import Mesh
from weft.optim.adamw import AdamW
from weft.optim.build_optimizers import Optimizers, Params, build_optimizers
from weft.optim.state_codecs import EIGHT_BITS, LOW_BYTE, CodedState, Rounding, StateCodec

ROW_ALIGNMENT = 16
"""Rows at which a weight may be cut: a multiple of the vectors that kernels process, so that cutting changes no bit."""
Home = str
"""device, host or disk."""
HOME_KINDS = {"low": "master", "ema": "averages"}
"""Kinds of states with homes of their own (memory.homes); the optimizer's own are moments."""


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

    def shape_in(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of its rows of a tensor, which may have no memory now."""
        shape = tuple(tensor.shape)
        return shape if self.end is None else (self.end - self.first, *shape[1:])


@dataclass(eq=False)
class PlacedState:
    """A state of a piece: how it is stored, where, and where the optimizer looks for it."""

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
    codec: StateCodec | None = None
    """None: it is stored as the optimizer works on it."""
    host: Tensor | None = None
    """What is stored of it in host memory; None: it lives on the device or on disk."""
    stored: Tensor | None = None
    """What is stored of it, on the device."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.codec is None else self.codec.stored_shape(self.shape)

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.dtype if self.codec is None else self.codec.dtype

    @property
    def bytes(self) -> int:
        """Bytes that are stored."""
        return prod(self.stored_shape) * self.stored_dtype.itemsize

    def bind(self, stored: Tensor) -> None:
        """Take what is stored; the optimizer works on it if it is not encoded."""
        self.stored = stored
        if self.codec is None:
            self._show(stored)

    def decode(self) -> None:
        """Make the optimizer work on the decoded values."""
        assert self.codec is not None and self.stored is not None
        self._show(self.codec.decode(self.stored, self.shape))

    def show_coded(self, rounding: Rounding) -> None:
        """Make the optimizer's kernel work on what is stored."""
        assert self.stored is not None
        self.holder[self.key] = CodedState(self.stored, rounding)

    def encode(self, rounding: Rounding) -> None:
        """Store the values that the optimizer has worked on, and free them."""
        assert self.codec is not None and self.stored is not None
        self.codec.encode(local_of(self.holder[self.key]), self.stored, rounding)
        self.hide()

    def hide(self) -> None:
        """Free the values that the optimizer has worked on."""
        self.holder[self.key] = torch.empty(0)

    def _show(self, values: Tensor) -> None:
        self.holder[self.key] = values if self.placed_as is None else like(values, self.placed_as)


@dataclass(eq=False)
class Piece:
    """Weights that are updated together, with an optimizer of their own."""

    unit: str
    slices: list[WeightSlice]
    optimizers: Optimizers
    homes: dict[tuple[str, str], Home]
    """By kind of states and slice."""
    averages: dict[str, Any] = field(default_factory=dict)
    """The moving averages by key, where the run has them."""
    streamed: list[PlacedState] = field(default_factory=list)
    disk: list[PlacedState] = field(default_factory=list)
    """Those of them that live on disk."""
    coded: list[PlacedState] = field(default_factory=list)
    """States with a codec, wherever they live."""
    stored: Any = None
    """Event at the end of the last copy from the device."""

    @property
    def coded_in_kernel(self) -> bool:
        """Whether the optimizer's kernel decodes and encodes the states itself (coded_adamw_kernels.py)."""
        known = (*EIGHT_BITS.values(), LOW_BYTE)
        return (
            not self.averages
            and all(isinstance(part, AdamW) for part in self.optimizers.parts)
            and all(state.codec in known and state.placed_as is None for state in self.coded)
        )


def cut_pieces(
    optim: Optim, model: Any, is_block: Callable[[str], bool], units: list[str], mesh: Mesh,
    shares: dict[str, dict[Home, float]], split: bool, limit: int, enter: Callable[[str], None],
) -> list[Piece]:  # fmt: skip
    """The pieces of a model in the order of the forward pass; what is outside the units comes first. `enter` is called
    before each unit, whose weights must have memory while they are cut."""
    masters: Params = model.master_params

    def unit_of(name: str) -> str:
        return next((u for u in units if name.startswith(f"{u}.")), "")

    def cuttable(name: str) -> bool:
        master = masters[name]
        entry = OPTIMIZERS[optim.name].of(WeightShard(tuple(master.shape), master.numel(), is_block(name)))
        return entry.elementwise and not isinstance(master, DTensor)

    matrices = {n: local_of(m).numel() for n, m in masters.items() if m.dim() > 1}  # vectors are not worth a copy
    homes = {kind: assign_homes(matrices, own) for kind, own in shares.items()}
    pieces: list[Piece] = []
    turns: Counter[tuple[type, bool]] = Counter()
    for unit in ("", *units):
        enter(unit)
        names = [n for n in masters if unit_of(n) == unit]
        for slices in cut_slices(names, masters, cuttable, limit):
            found = {s.key: slice_params(s, masters, model.grad_params, model.compute_params, split) for s in slices}
            optimizers = build_optimizers(
                optim, {k: f[0] for k, f in found.items()}, is_block, {k: f[1] for k, f in found.items()},
                {k: f[2] for k, f in found.items() if f[2] is not None}, mesh,
            )  # fmt: skip
            for part in optimizers.parts:
                for group in part.param_groups:  # counted on, as in the one group of a resident run
                    kind = type(part), group["params"][0].dim() >= 2
                    group["first"] = turns[kind]
                    turns[kind] += len(group["params"])
            pieces.append(
                Piece(
                    unit,
                    slices,
                    optimizers,
                    {(kind, s.key): own.get(s.name, "device") for kind, own in homes.items() for s in slices},
                )
            )
    return pieces


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
    missing = dict.fromkeys(shares, 0.0)
    out: dict[str, Home] = {}
    for name, size in sizes.items():
        for home, share in shares.items():
            missing[home] += share * size
        best = max(missing, key=lambda home: missing[home], default="device")
        if not missing or missing[best] < size / 2:
            out[name] = "device"
        else:
            out[name] = best
            missing[best] -= size
    return out
