"""Weights under guard: sums of their bits, compared with what they were after the last update and with other ranks'."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from weft.comm.shards import local_of
from weft.guards.checksum import Digests, Kind
from weft.guards.majority import Odd, odd_ones
from weft.guards.step_report import Row
from weft.mesh import Mesh

CHEAP = 0.002
"""Of a step's time, what it may cost to look whether weights changed between two updates."""
BYTES_PER_S = 1.5e12
"""How fast a GPU reads, for that cost: its clock is not the host's."""
LATE = 1
"""Steps that are done before a comparison is read: it travels while they compute, and they are undone with the rest."""


@dataclass(frozen=True)
class Disagreement:
    """Ranks that should hold the same weights of a kind and do not."""

    kind: Kind
    odd: Odd


class Weights:
    """The weights of this rank, and who holds the same.

    Two looks: right after an update, and again before the next one, when nothing may have changed. The first is also
    compared between ranks, every so many steps.
    """

    def __init__(
        self, master_params: Mapping[str, Tensor], mesh: Mesh, coords: list[dict[str, int]], alone: bool, every: int
    ):
        """`alone`: replicas have weights of their own between rounds. `every` 0 looks never."""
        self.mesh, self.every, self.spacing = mesh, every, 1
        self.compared: set[int] = set()
        """Steps whose comparison is under way."""
        self.digests = Digests(master_params)
        everyone = cast(
            list[tuple[dict[Kind, str], list[str]]], mesh.all_gather_object((self.digests.held, self.digests.names))
        )
        self.names = [names for _, names in everyone]
        """Of the weights on every rank."""
        held = [held for held, _ in everyone]
        self.kinds = sorted({kind for mine in held for kind in mine})
        self.alike = {kind: _alike(kind, held, coords, alone) for kind in self.kinds}
        self.begin(master_params)

    def begin(self, master_params: Mapping[str, Tensor]) -> None:
        """Start afresh, with these tensors: a run that began anew has others."""
        self.digests = Digests(master_params)
        self.sums: Tensor | None = None
        self.changed: Tensor | int = 0
        """1 + the number of the weight that changed since the last update."""
        self.look_every, self.looked_s = 1, 0.0
        self.compared.clear()

    def before_update(self) -> None:
        """Weights are as they were after the last update, or something else changed them."""
        if self.sums is None:
            return
        began = time.perf_counter()
        differs = self.digests.each() != self.sums
        where, some = differs.int().argmax() + 1, differs.any()
        if differs.is_cuda:
            self.changed = torch.where(some, where, 0)
            held = sum(local_of(m).numel() * m.element_size() for m in self.digests.master_params.values())
            self.looked_s = held / BYTES_PER_S
        else:
            self.changed = int(where) if some else 0
            self.looked_s = time.perf_counter() - began
        self.sums = None

    def look(self, step: int, seconds: float) -> Tensor | None:
        """After an update: sum up the weights, if it is time; returns the halves of each kind's sum for the others."""
        self.changed = 0
        compare = self.due(step)
        if self.looked_s:
            self.look_every = max(1, math.ceil(2 * self.looked_s / (CHEAP * max(seconds, 1e-9))))
        if not compare and not (self.every and step % self.look_every == 0):
            return None
        self.sums = self.digests.each()
        if not compare:
            return None
        self.compared.add(step)
        mine = self.digests.by_kind(self.sums).view(-1, 2)
        out = mine.new_zeros(len(self.kinds), 2)
        out[[self.kinds.index(kind) for kind in self.digests.kinds]] = mine
        return out.reshape(-1)

    def due(self, step: int) -> bool:
        """Whether ranks compare their weights after this step."""
        return self.every > 0 and step % period(self.every, self.spacing) == 0

    def disagreements(self, rows: list[Row]) -> list[Disagreement]:
        """Who holds others than the ranks that should hold the same."""
        found = []
        for i, kind in enumerate(self.kinds):
            digests = {rank: row.digests[2 * i : 2 * i + 2] for rank, row in enumerate(rows)}
            found += [Disagreement(kind, odd) for odd in odd_ones(self.alike[kind], digests, set())]
        return found


def period(every: int, spacing: int) -> int:
    """Steps from one comparison to the next, so that at most `every` are lost when one fails: they are those since the
    comparison before and those done meanwhile. It falls on steps that are kept, which are `spacing` apart."""
    most = max(1, every - LATE)
    return most // spacing * spacing or most


def _alike(kind: Kind, held: list[dict[Kind, str]], coords: list[dict[str, int]], alone: bool) -> list[tuple[int, ...]]:
    """The ranks that hold the same shards of a kind's weights, unless they train alone and so have their own."""
    groups: dict[tuple[str, int], list[int]] = {}
    for rank, mine in enumerate(held):
        if kind in mine:
            own = coords[rank].get("dp_replicate", 0) if alone else 0
            groups.setdefault((mine[kind], own), []).append(rank)
    return [tuple(g) for g in groups.values() if len(g) > 1]
