"""Updates of whole matrices: batches of weights, and values that one of the ranks with the same shard computes for all.

Sums and products of floats may differ in the last bit between processes, since libraries choose kernels by memory
alignment, threads and earlier calls. If each replica computed them, weights that must be equal would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.shards import LocalShard, on_flat_, shard_of
from weft.mesh import Mesh
from weft.planner.engine_constants import UPDATED_ELEMENTS


@dataclass(frozen=True)
class Source:
    """Which of the ranks with the same shard computes something for all of them."""

    axes: tuple[Axis, ...]
    places: tuple[int, ...]
    """Its rank on each axis."""

    @classmethod
    def of(cls, mesh: Mesh | None, param: Tensor, index: int = 0) -> Source:
        """The `index`-th of the ranks that hold the same shard of a weight, in turn."""
        axes = () if mesh is None else tuple(mesh.replica_axes(param))
        places = []
        for axis in axes:
            index, place = divmod(index, axis.size)
            places.append(place)
        return cls(axes, tuple(places))

    @property
    def here(self) -> bool:
        """Whether it is this rank."""
        return all(axis.rank == place for axis, place in zip(self.axes, self.places, strict=True))

    @property
    def ranks(self) -> int:
        """How many ranks hold the shard."""
        return torch.Size(axis.size for axis in self.axes).numel()

    def send(self, value: Tensor) -> Tensor:
        """Its value, in place, on all of them."""
        for axis, place in zip(self.axes, self.places, strict=True):
            axis.broadcast(value, place)
        return value


def take_from_first(mesh: Mesh | None, parts: list[list[Tensor]], params: list[Tensor]) -> None:
    """Replace the tensors computed for each weight, in place, by those of the first rank with the same shard."""
    kinds: dict[tuple[str, ...], tuple[Source, list[Tensor]]] = {}
    for tensors, param in zip(parts, params, strict=True):
        source = Source.of(mesh, param)
        kinds.setdefault(tuple(axis.name for axis in source.axes), (source, []))[1].extend(tensors)
    for source, tensors in kinds.values():
        if source.axes and tensors:
            on_flat_(tensors, source.send)


def sum_over_shards(mesh: Mesh | None, parts: list[list[Tensor]], params: list[Tensor]) -> None:
    """Sum in place what the ranks computed of each weight, those with the same shard once."""
    take_from_first(mesh, parts, params)
    add_up(parts, [shard_of(param) for param in params])


def add_up(parts: list[list[Tensor]], shards: list[LocalShard]) -> None:
    """Sum each list in place over the ranks that hold its tensor's other shards: one message a kind of cut."""
    kinds: dict[tuple[int, ...], tuple[LocalShard, list[Tensor]]] = {}
    for tensors, shard in zip(parts, shards, strict=True):
        if shard.groups:
            kinds.setdefault(tuple(map(id, shard.groups)), (shard, []))[1].extend(tensors)
    for shard, tensors in kinds.values():
        on_flat_(tensors, shard.sum)


def batches(sizes: Sequence[int], limit: int = UPDATED_ELEMENTS, least: int = 1) -> list[slice]:
    """Weights that an optimizer updates together, for few launches and bounded temporary tensors: indices of
    consecutive ones with at most `limit` elements, or `least` larger ones."""
    slices, first, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index - first >= least and filled + size > limit:
            slices.append(slice(first, index))
            first, filled = index, 0
        filled += size
    return [*slices, slice(first, len(sizes))] if sizes else []
