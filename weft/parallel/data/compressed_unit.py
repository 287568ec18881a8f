"""One unit of compressed gradients: a bucket of replicas or a unit of shards, with its residual.

The residual is what a codec did not send. It is kept in units of the summed loss, since the loss scale may change, and
added to the next message. A skipped step changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.compression.codecs import Codecs
from weft.comm.compression.compressed_sum import sum_low_rank
from weft.comm.compression.warmup import fit_basis
from weft.planner.time.compression_warmup import RAMP_FACTOR, rank_at, thin_pays


@dataclass(frozen=True)
class Segment:
    """The place of a weight's gradient in each row of a channel."""

    name: str
    start: int
    length: int
    shape: torch.Size
    """The shape of this rank's part of the weight, before it is sharded over the data-parallel axes."""

    def of(self, x: Tensor) -> Tensor:
        """Its columns of [rows, n]."""
        return x[:, self.start : self.start + self.length]

    def matrix(self, x: Tensor) -> Tensor:
        return self.of(x).reshape(-1, self.shape[1:].numel())

    def weight(self, x: Tensor) -> Tensor:
        """In the weight's shape, without padding."""
        return self.of(x).reshape(-1)[: self.shape.numel()].view(self.shape)


class CompressedUnit:
    """A bucket or a unit: its weights, their codecs, and the residual, [rows, n]."""

    def __init__(self, codecs: Codecs, rank: int, segments: list[Segment], rows: int, width: int) -> None:
        """`rank` is PowerSGD's, or 0."""
        self.codecs, self.rank = codecs, rank
        self.segments, self.rows, self.width = segments, rows, width
        starts = [0, *(s.start for s in segments[1:]), width]
        self.parts = tuple(after - start for start, after in pairwise(starts))
        """The columns of each weight, with padding."""
        self.age = math.inf
        """The age of the run at this step, in warm-ups."""
        self.residual: Tensor | None = None
        self.bases: dict[str, Tensor] = {}
        """PowerSGD's bases of the last step, by weight."""
        self.before: tuple[Tensor | None, dict[str, Tensor]] | None = None
        """Residual and bases before a step that may still be skipped."""
        self.ready_s = 0.0

    @property
    def low_rank_now(self) -> bool:
        """Whether matrices are sent as low-rank products at this step."""
        shapes = [(s.shape[0], s.shape[1:].numel()) for s in self.segments]
        return self.rank > 0 and thin_pays(self.rank, shapes, self.age)

    def begin(self, at: float) -> None:
        """Begin a step at an age of the run; if the last one was skipped, restore the state before it."""
        self.age = at
        if self.before is not None:
            self.residual, self.bases = self.before
        self.before = (self.residual, dict(self.bases))

    def keep(self, taken: bool | Tensor) -> None:
        """End a step that was taken or skipped; `taken` may be a tensor on a GPU."""
        if isinstance(taken, Tensor) and self.before is not None:
            residual, bases = self.before
            if self.residual is not None:
                self.residual = torch.where(
                    taken, self.residual, torch.zeros_like(self.residual) if residual is None else residual
                )
            for s in self.segments:
                if (base := self.bases.get(s.name)) is not None:
                    self.bases[s.name] = torch.where(taken, base, self.base(s, bases, base.device))
        if taken is not False:
            self.before = None

    @property
    def kept(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Residual and bases after the last step that was taken."""
        return self.before or (self.residual, self.bases)

    def add_residual(self, x: Tensor, scale: float) -> None:
        """Add the residual to what will be sent."""
        if self.residual is not None:
            x.add_(self.residual, alpha=scale)

    def set_residual(self, error: Tensor | None, scale: float) -> None:
        self.residual = None if error is None else error.div_(scale)

    def low_rank(self, axes: Sequence[Axis], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """PowerSGD over some axes: by weight the sum, [rows, length], and the errors, [rows, n]."""
        matrices = [s.matrix(x) for s in self.segments]
        bases = [self.base(s, self.bases, x.device) for s in self.segments]
        sums, errors, rows = sum_low_rank(axes, matrices, bases)
        self.bases = {s.name: q for s, q in zip(self.segments, rows, strict=True)}
        left = torch.zeros_like(x)
        for segment, error in zip(self.segments, errors, strict=True):
            segment.of(left).copy_(error.view(self.rows, -1))
        return {s.name: m.view(self.rows, -1) for s, m in zip(self.segments, sums, strict=True)}, left

    def base(self, segment: Segment, bases: dict[str, Tensor], device: torch.device) -> Tensor:
        """The base of a weight with the rank of this step. The first one is the same on every rank."""
        columns = segment.shape[1:].numel()
        shape = (columns, rank_at(self.rank, segment.shape[0], columns, self.age))
        base = bases.get(segment.name)
        if base is not None and base.shape == shape:
            return base
        generator = torch.Generator().manual_seed(columns)  # the same numbers for every rank of the matrix
        first = (
            torch.randn(columns, RAMP_FACTOR * self.rank, generator=generator)[:, : shape[1]].to(device).contiguous()
        )
        return first if base is None else fit_basis(base, first).contiguous()
