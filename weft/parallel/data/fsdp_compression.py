"""Compressed collectives for FSDP2: the reduce-scatter of a unit's gradients and the all-gather of its weights.

FSDP2 concatenates the weights of a unit: row i of [ranks, columns] is the shard of rank i, of each weight its share of
the rows, padded with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.axis import native_all_gather, native_reduce_scatter
from weft.comm.compression.compressed_sum import gather_encoded
from weft.parallel.data.compressed_unit import Segment
from weft.parallel.data.compression import Compressor
from weft.parallel.data.fsdp_collectives import Allocates

Weights = list[tuple[str, torch.Size]]


class Columns:
    """Which columns of a unit are compressed, and which are not."""

    def __init__(self, compressor: Compressor, weights: Weights) -> None:
        ranks = compressor.axis.size
        self.segments: list[Segment] = []
        """The place of each compressed weight among the compressed columns."""
        self.packed: list[slice] = []
        self.plain: list[slice] = []
        self.width, self.packed_width = 0, 0
        for name, size in weights:
            length = -(-size[0] // ranks) * size[1:].numel()
            here = slice(self.width, self.width + length)
            self.width += length
            if name not in compressor.names:
                self.plain.append(here)
                continue
            self.segments.append(Segment(name, self.packed_width, length, size))
            self.packed.append(here)
            self.packed_width += length

    @staticmethod
    def pick(x: Tensor, columns: list[slice]) -> Tensor:
        """These columns of [rows, width], concatenated."""
        return torch.cat([x[:, c] for c in columns], 1)

    @staticmethod
    def put(x: Tensor, columns: list[slice], values: Tensor) -> None:
        """Copy values, [rows, …], into these columns of x."""
        for c, part in zip(columns, values.split([c.stop - c.start for c in columns], 1), strict=True):
            x[:, c].copy_(part)


class CompressedScatter(Allocates):
    """A unit's reduce-scatter and, where shards have replicas, the sum over them."""

    def __init__(self, compressor: Compressor, weights: Weights) -> None:
        self.compressor, self.columns = compressor, Columns(compressor, weights)
        self.unit = None
        if self.columns.segments:
            width = self.columns.packed_width
            self.unit = compressor.add_unit(self.columns.segments, compressor.axis.size, width)
        self.partial: Tensor | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        columns, axis = self.columns, self.compressor.axis
        x = input_tensor.view(axis.size, -1)
        if self.unit is None or x.shape[1] != columns.width:  # a weight without a gradient has no columns
            axis.count("reduce_scatter", input_tensor)
            native_reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        out = output_tensor.view(1, -1)
        columns.put(out, columns.packed, self.compressor.scatter(self.unit, columns.pick(x, columns.packed))[None])
        if columns.plain:
            columns.put(out, columns.plain, axis.reduce_scatter(columns.pick(x, columns.plain), 0))

    def across(self, part: Tensor) -> None:
        """FSDP2's all-reduce hook: after the last backward pass of a step, sums this rank's part over the replicas,
        together with those of the passes before."""
        compressor, columns = self.compressor, self.columns
        assert compressor.across is not None
        if not compressor.last:
            self.partial = part.clone() if self.partial is None else self.partial.add_(part)
            part.zero_()
            return
        if self.partial is not None:
            part.add_(self.partial)
            self.partial = None
        if self.unit is None or part.numel() != columns.width:
            compressor.across.all_reduce(part)
            return
        row = part.view(1, -1)
        columns.put(row, columns.packed, compressor.sum_across(self.unit, columns.pick(row, columns.packed)[0])[None])
        if columns.plain:
            columns.put(row, columns.plain, compressor.across.all_reduce(columns.pick(row, columns.plain)))


class CompressedGather(Allocates):
    """A unit's all-gather of weights."""

    def __init__(self, compressor: Compressor, scatter: CompressedScatter, weights: Weights) -> None:
        self.compressor, self.scatter, self.columns = compressor, scatter, Columns(compressor, weights)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        columns, axis, unit = self.columns, self.compressor.axis, self.scatter.unit
        codec = unit.codecs.weights if unit is not None else None
        n = input_tensor.numel()
        worth = codec is not None and codec.bytes_of(n) < n * input_tensor.element_size()
        if codec is None or not worth or n != columns.width or not input_tensor.is_floating_point():
            axis.count("all_gather", input_tensor)
            native_all_gather(output_tensor, input_tensor, group=group)
            return
        row = input_tensor.view(1, -1)
        plain = columns.pick(row, columns.plain) if columns.plain else None  # the row is a view of the output
        gathered, _ = gather_encoded(axis, codec, columns.pick(row, columns.packed)[0].float(), None)
        out = output_tensor.view(axis.size, -1)
        columns.put(out, columns.packed, gathered)
        if plain is not None:
            columns.put(out, columns.plain, axis.all_gather(plain, 0))
