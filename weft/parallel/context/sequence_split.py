"""Which tokens each rank of cp holds, and which chunks of a sequence attend to which.

Causal work is balanced by zig-zag: the sequence is split into 2 · ring chunks, and the r-th group holds the r-th from
the front and the r-th from the end, so that every group computes the same number of scores in every hop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.fake_internals import is_fake
from weft.models.attention_kernels import KeyLimits
from weft.models.decoder_inputs import shifted_right
from weft.models.documents import Docs, Ids, find_segments, ids_on_host
from weft.planner.plan import Plan
from weft.planner.time.context import chunk_size, chunks_of, sees

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class SequenceSplit:
    """The tokens of a rank of cp: its share of the chunks of its group."""

    ring: int
    ulysses: int
    halves: int
    """Chunks of a group: 2 if causal work is balanced, else 1."""
    align: int
    """A rank's tokens are a multiple of this, since tp shards them further."""
    rank: int

    @classmethod
    def of(cls, plan: Plan, rank: int) -> SequenceSplit:
        ring, ulysses = plan.rings
        return cls(ring, ulysses, 2 if plan.zigzag else 1, plan.tp if plan.sequence else 1, rank)

    @property
    def group(self) -> int:
        return self.rank // self.ulysses

    @property
    def peers(self) -> range:
        """The ranks of this group, as places on the cp axis."""
        return range(self.group * self.ulysses, (self.group + 1) * self.ulysses)

    def padded(self, length: int) -> int:
        """The length with padding, which is never attended to and has no target."""
        chunks = self.ring * self.halves
        return chunks * chunk_size(length, chunks, self.ulysses * self.align)

    def rows(self, length: int) -> Tensor:
        """The positions of this rank's tokens in the whole sequence."""
        size = self.padded(length) // (self.ring * self.halves)
        held = [torch.arange(j * size, (j + 1) * size) for j in chunks_of(self.group, self.ring, self.halves)]
        return torch.cat(held).chunk(self.ulysses)[self.rank % self.ulysses]

    def batch(self, batch: Batch) -> Batch:
        """This rank's part of a batch. Document numbers stay whole, since masks need those of other ranks."""
        length, rows, inside = self._held(batch["inputs"])
        out = {**batch, "rows": rows, "length": torch.tensor(length), "positions": inside}
        by_token = batch["valid"].dim() > 1
        for key in ("inputs", *(("targets",) if by_token else ()), "positions", "types"):
            if key in batch and batch[key].dim() > 1:
                out[key] = batch[key].index_select(1, inside)
        if by_token:
            out["valid"] = batch["valid"].index_select(1, inside) & (rows < length)
        elif self.rank > 0:  # one target a sample, which every rank computes: one of them counts it
            out["valid"] = torch.zeros_like(batch["valid"])
        return out

    def pairs(self, batch: Batch) -> Batch:
        """This rank's part of a batch of sources and targets. The decoder's inputs are shifted before the split: the
        first of a rank is the last target of the rank before."""
        shifted = shifted_right(batch["targets"], batch["valid"])
        length, rows, inside = self._held(batch["inputs"])
        target, own, known = self._held(batch["targets"])
        return {
            **batch, "inputs": batch["inputs"].index_select(1, inside), "rows": rows, "length": torch.tensor(length),
            "decoder_inputs": shifted.index_select(1, known), "decoder_rows": own,
            "decoder_length": torch.tensor(target), "targets": batch["targets"].index_select(1, known),
            "valid": batch["valid"].index_select(1, known) & (own < target),
        }  # fmt: skip

    def joined(self, x: Tensor, axis: Axis, length: int) -> Tensor:
        """A tensor [..., length] of whole sequences, from the parts of all ranks."""
        held = torch.cat([replace(self, rank=rank).rows(length) for rank in range(axis.size)])
        return axis.all_gather(x, x.dim() - 1).index_select(-1, held.argsort()[:length].to(x.device))

    def _held(self, tokens: Tensor) -> tuple[int, Tensor, Tensor]:
        """The length of sequences [batch, length, ...], and the positions of this rank's tokens with padding, and with
        the last token in place of padding."""
        length = tokens.shape[1]
        rows = self.rows(length).to(tokens.device, non_blocking=True)
        return length, rows, rows.clamp(max=length - 1)


@dataclass(frozen=True)
class Blocks:
    """The chunks of one sequence, and which of them see which."""

    cut: SequenceSplit
    length: int
    causal: bool
    docs: Tensor | None
    window: int | None = None
    found: dict[tuple[int, int], Docs] = field(default_factory=dict)
    """Documents of pairs of chunks."""

    @cached_property
    def ids(self) -> Ids | None:
        return None if self.docs is None else ids_on_host(self.docs)

    @cached_property
    def size(self) -> int:
        return self.cut.padded(self.length) // (self.cut.ring * self.cut.halves)

    @cached_property
    def spans(self) -> list[list[tuple[int, int]]]:
        """The first and last document of each chunk, sample by sample. Fake tensors have no values: every chunk then
        has a part of the same two documents."""
        assert self.docs is not None
        if is_fake(self.docs):
            return [[(0, 1)] * len(self.docs)] * (self.cut.ring * self.cut.halves)
        parts = [self.docs[:, j * self.size : (j + 1) * self.size] for j in range(self.cut.ring * self.cut.halves)]
        ends = [torch.stack([p.amin(1), p.amax(1)], 1) for p in parts if p.shape[1]]
        return [[(lo, hi) for lo, hi in chunk] for chunk in torch.stack(ends).tolist()]

    def of(self, group: int) -> list[int]:
        """The chunks a group holds."""
        return chunks_of(group, self.cut.ring, self.cut.halves)

    def tokens(self, j: int) -> int:
        """Tokens of a chunk, without padding."""
        return min(max(self.length - j * self.size, 0), self.size)

    def sees(self, i: int, j: int) -> bool:
        """Whether any query of chunk i sees any key of chunk j."""
        if not sees(i, j, self.causal, self.size, self.window) or not self.tokens(i) or not self.tokens(j):
            return False
        if self.docs is None:
            return True
        pairs = zip(self.spans[i], self.spans[j], strict=True)
        return any(a <= d and c <= b for (a, b), (c, d) in pairs)

    def wanted(self, group: int, of: int) -> list[int]:
        """The chunks of one group that another needs."""
        return [j for j in self.of(of) if any(self.sees(i, j) for i in self.of(group))]

    def limits(self, i: int, j: int) -> KeyLimits:
        """Which keys of chunk j the queries of chunk i attend to."""
        offset = (i - j) * self.size
        limited = self.window is not None and offset + self.tokens(i) > self.window
        return KeyLimits(self.causal and i == j, self.documents(i, j), self.window if limited else None, offset)

    def documents(self, i: int, j: int) -> Docs | None:
        """The documents of chunk i's queries and of chunk j's keys; None if all belong to one document."""
        if self.docs is None:
            return None
        if all(a == b == c == d for (a, b), (c, d) in zip(self.spans[i], self.spans[j], strict=True)):
            return None
        if (i, j) not in self.found:
            here, there = (slice(x * self.size, x * self.size + self.tokens(x)) for x in (i, j))
            segments = None
            if self.ids is not None and (self.window is None or i == j):  # in each its queries and keys begin together
                segments = find_segments(self.ids[:, here], self.ids[:, there], self.docs.device)
            self.found[i, j] = Docs(self.docs[:, here], self.docs[:, there], segments)
        return self.found[i, j]
