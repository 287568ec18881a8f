"""Silent corruption of weights: checksums compared between updates and between replicas."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.shards import local_of
from weft.guards.checksum import Checksums, Kind
from weft.guards.majority import Outliers, find_outliers
from weft.guards.step_report import RankFigures
from weft.mesh import Mesh

MAX_CHECK_SHARE = 0.002
"""Share of a step's time that checks between updates may cost."""
BYTES_PER_S = 1.5e12
"""GPU read bandwidth used to estimate that cost."""
COMPARE_DELAY_STEPS = 1
"""Steps computed before a comparison is read; they are undone if it fails."""


@dataclass(frozen=True)
class WeightMismatch:
    """Ranks whose weights of a kind should be equal and are not."""

    kind: Kind
    outliers: Outliers


class WeightChecks:
    """Checksums of this rank's weights, and which ranks hold the same.

    They are taken right after an update and checked before the next one, when nothing may have changed. Every few steps
    the first are also compared between ranks.
    """

    def __init__(
        self, master_params: Mapping[str, Tensor], mesh: Mesh, coords: list[dict[str, int]], alone: bool, every: int
    ):
        """`alone`: replicas have their own weights between synchronizations. `every` 0 disables the checks."""
        self.mesh, self.every, self.spacing = mesh, every, 1
        self.compared: set[int] = set()
        """Steps whose comparison is not read yet."""
        self.digests = Checksums(master_params)
        everyone = mesh.all_gather_json((list(self.digests.held.items()), self.digests.names))
        self.names: list[list[str]] = [names for _, names in everyone]
        """Names of the weights on every rank."""
        held: list[dict[Kind, str]] = [{tuple(kind): text for kind, text in pairs} for pairs, _ in everyone]
        self.kinds = sorted({kind for mine in held for kind in mine})
        self.same_shards = {kind: _ranks_with_same_shards(kind, held, coords, alone) for kind in self.kinds}
        self.begin(master_params)

    def begin(self, master_params: Mapping[str, Tensor]) -> None:
        """Reset with these tensors."""
        self.digests = Checksums(master_params)
        self.sums: Tensor | None = None
        self.changed: Tensor | int = 0
        """1 + the index of the weight that changed since the last update."""
        self.look_every, self.looked_s = 1, 0.0
        self.compared.clear()

    def before_update(self) -> None:
        """Check that weights have not changed since the last update."""
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
        """Compute checksums after an update, if due; returns the values to compare with other ranks."""
        self.changed = 0
        compare = self.due(step)
        if self.looked_s:
            self.look_every = max(1, math.ceil(2 * self.looked_s / (MAX_CHECK_SHARE * max(seconds, 1e-9))))
        if not compare and not (self.every and step % self.look_every == 0):
            return None
        self.sums = self.digests.each()
        if not compare:
            return None
        self.compared.add(step)
        mine = dict(zip(self.digests.kinds, self.digests.by_kind(self.sums).view(-1, 2), strict=True))
        nothing = self.sums.new_zeros(2, dtype=torch.float64)
        return torch.cat([mine.get(kind, nothing) for kind in self.kinds])

    def due(self, step: int) -> bool:
        """Whether ranks compare weights after this step."""
        return self.every > 0 and step % period(self.every, self.spacing) == 0

    def disagreements(self, rows: list[RankFigures]) -> list[WeightMismatch]:
        """The groups of ranks whose weights differ."""
        found = []
        for i, kind in enumerate(self.kinds):
            digests = {rank: row.digests[2 * i : 2 * i + 2] for rank, row in enumerate(rows)}
            found += [
                WeightMismatch(kind, outliers) for outliers in find_outliers(self.same_shards[kind], digests, set())
            ]
        return found


def period(every: int, spacing: int) -> int:
    """Steps between comparisons, so that a failed one loses at most `every` steps. Comparisons fall on steps with a
    snapshot, which are `spacing` apart."""
    most = max(1, every - COMPARE_DELAY_STEPS)
    return most // spacing * spacing or most


def _ranks_with_same_shards(
    kind: Kind, held: list[dict[Kind, str]], coords: list[dict[str, int]], alone: bool
) -> list[tuple[int, ...]]:
    """Groups of ranks with the same shards of a kind; local replicas are kept apart."""
    groups: dict[tuple[str, int], list[int]] = {}
    for rank, mine in enumerate(held):
        if kind in mine:
            own = coords[rank].get("dp_replicate", 0) if alone else 0
            groups.setdefault((mine[kind], own), []).append(rank)
    return [tuple(g) for g in groups.values() if len(g) > 1]
