"""The lookup of a batch over ranks: ids go to the ranks with their rows, vectors come back, and gradients follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.axis import Axis
from weft.extensions.recommenders.models.tables import Bags, bag_sizes
from weft.extensions.recommenders.tables.stored_group import StoredGroup


@dataclass
class GroupLookup:
    """The ids of a batch in one group of tables."""

    group: StoredGroup
    keys: Tensor
    """[ids]"""
    bag: Tensor
    """[ids], rising over the features of the group."""
    bags: int
    weights: Tensor | None
    """[ids]; the factor of each id's row in its bag, None: 1."""
    order: Tensor = field(default_factory=lambda: torch.empty(0))
    """[ids]; ids sorted by key."""
    counts: Tensor = field(default_factory=lambda: torch.empty(0))
    """Ids of each distinct key."""
    unique: Tensor | None = None
    """Distinct keys, rising."""
    permutation: Tensor | None = None
    """Of an owned group: the distinct keys in the order of their owners."""
    places: Tensor = field(default_factory=lambda: torch.empty(0))
    """The places of the distinct keys in the storage of the ranks that hold them, in that order."""
    wanted: list[int] = field(default_factory=list)
    """Rows that this rank asks of each rank."""
    asked: list[int] = field(default_factory=list)
    """Rows that each rank asks of this one."""
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    """Those rows, in rank order."""

    def sort(self) -> Tensor:
        """The distinct keys."""
        if self.unique is None:
            ordered, self.order = torch.sort(self.keys, stable=True)
            self.unique, self.counts = torch.unique_consecutive(ordered, return_counts=True)
        return self.unique

    def inverse(self) -> Tensor:
        """[ids]; the number of each id's key among the distinct ones."""
        numbers = torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(
            self.counts, output_size=len(self.order)
        )
        return torch.empty_like(self.order).index_copy_(0, self.order, numbers)

    def pooled(self, weight: Tensor, at: Tensor) -> Tensor:
        """[bags, dim] of rows of `weight`, one for each id."""
        sizes = bag_sizes(self.bag, self.bags)
        return F.embedding_bag(at, weight, sizes.cumsum(0) - sizes, mode="sum", per_sample_weights=self.weights)

    def row_gradients(self, grad: Tensor) -> Tensor:
        """[distinct keys, dim]: the sum, in the order of the ids, of the gradients of the bags that have a key."""
        self.sort()
        weights = None if self.weights is None else self.weights[self.order]
        starts = self.counts.cumsum(0) - self.counts
        return F.embedding_bag(self.bag[self.order], grad, starts, mode="sum", per_sample_weights=weights)

    def route(self, world: int) -> Tensor:
        """Find the ranks with the rows of the distinct keys; returns how many rows each is asked for, [ranks]."""
        unique, group = self.sort(), self.group
        if group.layout.spread != "owned":  # every rank holds them, at the same place
            self.places = unique
            return torch.full((world,), len(unique), device=unique.device)
        segment = torch.searchsorted(group.starts, unique, right=True) - 1
        owner = group.owners[segment]
        self.permutation = torch.sort(owner, stable=True).indices
        self.places = (unique - group.starts[segment] + group.places[segment])[self.permutation]
        return torch.bincount(owner, minlength=world)

    def for_rank(self, x: Tensor, rank: int) -> Tensor:
        """The part for a rank of a tensor with a row for each of the places."""
        if self.permutation is None:
            return x
        first = sum(self.wanted[:rank])
        return x[first : first + self.wanted[rank]]

    def answers(self) -> list[Tensor]:
        """The vectors that each rank asked of this one. Every rank has its own copy of a replicated table."""
        group = self.group
        if group.layout.spread != "replicate":
            return list(group.storage.read(self.rows).split(self.asked))
        mine = self.rows.split(self.asked)[group.rank]
        none = torch.empty(0, group.width, device=group.device)
        return [group.storage.read(mine) if rank == group.rank else none for rank in range(len(self.asked))]

    def answer_shape(self, rank: int) -> tuple[int, int]:
        """Of the vectors that come from a rank."""
        left, right = self.group.layout.columns(rank)
        own = self.group.layout.spread != "replicate" or rank == self.group.rank
        return self.wanted[rank] if own else 0, right - left

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The vectors of the distinct keys, [distinct keys, dim], from those of all ranks."""
        if self.group.layout.spread == "replicate":
            return parts[self.group.rank]
        if self.permutation is None:
            return torch.cat(list(parts), dim=1)
        whole = torch.cat(list(parts))
        return torch.empty_like(whole).index_copy_(0, self.permutation, whole)

    def gradients_for(self, grad: Tensor, rank: int) -> Tensor:
        """What a rank is sent of the gradients of the distinct keys."""
        if self.permutation is not None:
            return self.for_rank(grad[self.permutation], rank)
        left, right = self.group.layout.columns(rank)
        return grad[:, left:right]


def make_lookups(groups: Sequence[StoredGroup], features: Sequence[Bags]) -> tuple[list[GroupLookup], list[list[int]]]:
    """The lookups of a batch, one a group, and the numbers of the features of each."""
    found, members = [], []
    for group in groups:
        inside = [i for i, f in enumerate(features) if f.table in group.layout.bases]
        if not inside:
            continue
        own = [features[i] for i in inside]
        firsts = [sum(f.count for f in own[:i]) for i in range(len(own))]
        weights = torch.cat([_weights(f) for f in own]) if any(f.mean for f in own) else None
        total = sum(f.count for f in own)
        if all(len(f.ids) == f.count == own[0].count for f in own):  # one id each, unless some bags are empty
            keys = (torch.stack([f.ids for f in own]) + group.base_of(tuple(f.table for f in own))).view(-1)
        else:
            keys = torch.cat([f.ids + group.layout.bases[f.table] for f in own])
        bag = torch.cat([f.bag + first for f, first in zip(own, firsts, strict=True)])
        found.append(GroupLookup(group, keys, bag, total, weights))
        members.append(inside)
    return found, members


def _weights(f: Bags) -> Tensor:
    if not f.mean:
        return torch.ones(len(f.ids), device=f.ids.device)
    return (1.0 / bag_sizes(f.bag, f.count).clamp(min=1).float())[f.bag]


class Lookup(torch.autograd.Function):
    """The pooled vectors of every group. The backward pass collects the gradients of rows on the ranks that hold them.

    `anchor` is a tensor with requires_grad: tables are no parameters, so that nothing else would ask for a gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, axis: Axis | None, lookups: list[GroupLookup]) -> tuple[Tensor, ...]:
        ctx.axis, ctx.lookups = axis, lookups
        vectors = None if axis is None else gather_vectors(axis, lookups)
        out = []
        for i, each in enumerate(lookups):
            if vectors is None and each.group.resident is not None:
                out.append(each.pooled(each.group.resident, each.keys))
                continue
            rows = each.group.storage.read(each.sort()) if vectors is None else vectors[i]
            out.append(each.pooled(rows, each.inverse()))
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lookups: list[GroupLookup] = ctx.lookups
        found = [each.row_gradients(grad.float().contiguous()) for each, grad in zip(lookups, grads, strict=True)]
        if ctx.axis is None:
            for each, grad in zip(lookups, found, strict=True):
                each.group.collect(each.sort(), grad)
        else:
            return_gradients(ctx.axis, lookups, found)
        return None, None, None


def gather_vectors(axis: Axis, lookups: list[GroupLookup]) -> list[Tensor]:
    """The vectors of each lookup's distinct keys: counts are exchanged, then ids, then vectors."""
    wanted = torch.stack([each.route(axis.size) for each in lookups], dim=1)  # [ranks, groups]
    counts = torch.stack([wanted, axis.swap(wanted)]).tolist()
    for i, each in enumerate(lookups):
        each.wanted, each.asked = ([row[i] for row in rows] for rows in counts)
    ranks = range(axis.size)
    ids = exchange(
        axis,
        [[each.for_rank(each.places, rank) for each in lookups] for rank in ranks],
        [[(each.asked[rank],) for each in lookups] for rank in ranks],
    )
    for i, each in enumerate(lookups):
        each.rows = torch.cat([ids[rank][i] for rank in ranks])
    answers = [each.answers() for each in lookups]
    vectors = exchange(
        axis, [[own[rank] for own in answers] for rank in ranks],
        [[each.answer_shape(rank) for each in lookups] for rank in ranks],
    )  # fmt: skip
    return [each.joined([vectors[rank][i] for rank in ranks]) for i, each in enumerate(lookups)]


def return_gradients(axis: Axis, lookups: list[GroupLookup], grads: list[Tensor]) -> None:
    """Send the gradients of the distinct keys to the ranks that hold their rows."""
    ranks = range(axis.size)
    found = exchange(
        axis,
        [[each.gradients_for(g, rank) for each, g in zip(lookups, grads, strict=True)] for rank in ranks],
        [[(each.asked[rank], each.group.width) for each in lookups] for rank in ranks],
    )
    for i, each in enumerate(lookups):
        each.group.collect(each.rows, torch.cat([found[rank][i] for rank in ranks]))


def exchange(
    axis: Axis, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Tensor]]:
    """Send some tensors to each rank in one all-to-all; returns those of each rank, which have these shapes."""
    send = [sum(x.numel() for x in row) for row in sent]
    sizes = [[torch.Size(shape).numel() for shape in row] for row in shapes]
    flat = torch.cat([x.reshape(-1) for row in sent for x in row])
    out, pending = axis.start_all_to_all(flat, send, [sum(row) for row in sizes])
    pending.wait()
    parts = out.split([sum(row) for row in sizes])
    return [
        [x.view(shape) for x, shape in zip(part.split(row), wanted, strict=True)]
        for part, row, wanted in zip(parts, sizes, shapes, strict=True)
    ]
