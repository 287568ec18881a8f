"""All-reduce by ring, tree or two levels (comm/algorithms.py) with encoded messages.

Partial sums are encoded for each message, and added in fp32 by the rank that receives them. A complete sum is encoded
once, by the rank that has it; these bytes are passed on as they are and decoded by every rank, also by the one that
encoded them, so all ranks end with the same bits. Every rank encodes each element of its tensor exactly once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.algorithms import (
    MessageFormat,
    Op,
    Rounds,
    RunningRounds,
    cut,
    cut_chunks,
    ring_all_gather,
    ring_reduce_scatter,
    start_round,
    tree_broadcast,
    tree_reduce,
)
from weft.comm.axis import Axis, Exchange
from weft.comm.compression.codec_base import Codec, RoundingNoise
from weft.comm.compression.compressed_sum import agree_on_largest

Encoding = Generator[Exchange, None, Tensor]
"""Rounds after which every member has the encoded sum: the payloads of its pieces, one after the other."""

SUM = dist.ReduceOp.SUM


@dataclass
class EncodedMessages(MessageFormat):
    """Messages of parts of one flat tensor, encoded. `missing` becomes what encoding lost of each element."""

    axis: Axis
    codec: Codec
    rounding: RoundingNoise | None
    flat: Tensor
    missing: Tensor | None

    def pack(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(0, dtype=torch.uint8)
        payload = self.codec.encode(x[None], self.rounding, agree_on_largest(self.axis, x.device))
        if self.missing is not None:
            first = x.storage_offset() - self.flat.storage_offset()
            lost = self.missing[first : first + x.numel()]
            torch.sub(x, self.codec.decode(payload, x.numel(), lost[None])[0], out=lost)
        return payload[0]

    def size(self, pieces: Sequence[Tensor]) -> int:
        """Bytes of the messages of some tensors."""
        return sum(self.codec.bytes_of(piece.numel()) for piece in pieces if piece.numel())

    def buffer(self, x: Tensor) -> Tensor:
        return self.buffer_of([x])

    def buffer_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """Where the messages of some tensors are received together."""
        return self.flat.new_empty(self.size(pieces), dtype=torch.uint8)

    def combine(self, x: Tensor, received: Tensor, op: Op) -> None:
        if x.numel():
            x.add_(self.codec.decode(received[None], x.numel())[0])

    def unpack(self, payload: Tensor, pieces: Sequence[Tensor]) -> None:
        """Decode the messages of some tensors into them."""
        for piece, part in zip(pieces, payload.split([self.size([p]) for p in pieces]), strict=True):
            if piece.numel():  # cloned, since a codec may view the bytes as wider numbers, which have to be aligned
                self.codec.decode(part.clone()[None], piece.numel(), piece[None])


def encoded_ring(axis: Axis, flat: Tensor, members: Sequence[int], messages: EncodedMessages) -> Encoding:
    me, shards = members.index(axis.rank), cut(flat, len(members))
    yield from ring_reduce_scatter(axis, shards, SUM, members, messages)
    payloads = [messages.pack(s) if i == me else messages.buffer(s) for i, s in enumerate(shards)]
    yield from ring_all_gather(axis, payloads, members)
    return torch.cat(payloads)


def encoded_tree(axis: Axis, flat: Tensor, members: Sequence[int], messages: EncodedMessages) -> Encoding:
    yield from tree_reduce(axis, flat, SUM, members, messages)
    payload = messages.pack(flat) if axis.rank == members[0] else messages.buffer(flat)
    yield from tree_broadcast(axis, payload, members)
    return payload


def encoded_levels(axis: Axis, flat: Tensor, members: Sequence[int], messages: EncodedMessages, near: int) -> Encoding:
    """Two levels; of a number of members that `near` does not divide, the last send to others, as in algorithms.py."""
    me, core = members.index(axis.rank), len(members) // near * near
    if me >= core:
        payload = messages.buffer_of(pieces_of(flat, "hierarchical", len(members), near))
        yield start_round(axis, [(members[me - core], messages.pack(flat))], [])
        yield start_round(axis, [], [(members[me - core], payload)])
        return payload
    served = me + core < len(members)
    if served:
        received = messages.buffer(flat)
        yield start_round(axis, [], [(members[me + core], received)])
        messages.combine(flat, received, SUM)
    inside, shards = members[me // near * near :][:near], cut(flat, near)
    yield from ring_reduce_scatter(axis, shards, SUM, inside, messages)
    own = yield from encoded_ring(axis, shards[me % near], members[me % near : core : near], messages)
    payloads = [own if i == me % near else messages.buffer_of(cut(s, core // near)) for i, s in enumerate(shards)]
    yield from ring_all_gather(axis, payloads, inside)
    payload = torch.cat(payloads)
    if served:
        yield start_round(axis, [(members[me + core], payload)], [])
    return payload


def pieces_of(flat: Tensor, algorithm: str, ranks: int, near: int) -> list[Tensor]:
    """The parts of a tensor whose sums are encoded by one rank each."""
    if algorithm == "hierarchical":
        return [piece for shard in cut(flat, near) for piece in cut(shard, ranks // near)]
    return cut(flat, ranks) if algorithm == "ring" else [flat]


def _rounds(axis: Axis, flat: Tensor, messages: EncodedMessages, algorithm: str, near: int) -> Rounds:
    members = range(axis.size)
    if algorithm == "hierarchical":
        payload = yield from encoded_levels(axis, flat, members, messages, near)
    else:
        by = {"ring": encoded_ring, "tree": encoded_tree}[algorithm]
        payload = yield from by(axis, flat, members, messages)
    messages.unpack(payload, pieces_of(flat, algorithm, axis.size, near))


def sum_encoded(
    axis: Axis, codec: Codec, x: Tensor, rounding: RoundingNoise | None, algorithm: str, near: int = 1
) -> Tensor | None:
    """Sum x, [n], in place over the ranks; `near` is the number of ranks of the axis on a node (hierarchical). Returns
    what was not sent of this rank's x, if the codec has error feedback."""
    missing = torch.zeros_like(x) if codec.feedback else None
    near, messages = max(1, min(near, axis.size)), EncodedMessages(axis, codec, rounding, x, missing)
    RunningRounds([_rounds(axis, part, messages, algorithm, near) for part in cut_chunks(x)]).wait()
    return missing
