"""Copies of weights that differ while nobody can tell which is right: what is kept of them until it shows.

All that differs between two copies that go the same way is what one of them suffered. The steps are computed again from
the last agreement, and where the values then come out next to those of one copy, the other was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.shards import local_of
from weft.guards.checksum import Kind, kind_of
from weft.mesh import Mesh

MOST = 64
"""Values that are kept."""
CLEAR = 4.0
"""Times as far off as the others must be who is named: a wrong copy leads the others a little astray, too."""

Place = tuple[str, int]
"""A weight, and where in this rank's shard of it."""


@dataclass(frozen=True)
class Doubt:
    """A disagreement after a step; `held` are the values of each rank of the group at the places that differ, when
    `read_at` steps were done: those that differed had already done one more."""

    step: int
    read_at: int
    group: tuple[int, ...]
    tries: int
    places: list[Place]
    held: dict[int, list[float]]


@torch.no_grad()
def differing(
    master_params: Mapping[str, Tensor], kind: Kind, group: tuple[int, ...], mesh: Mesh
) -> tuple[list[Place], dict[int, list[float]]]:
    """Where the weights of these ranks differ, and what each holds there. Every rank calls it, and all hear of it.

    It goes by the host, one weight after the other, to the first of the group.
    """
    places: list[Place] = []
    held: dict[int, list[float]] = {rank: [] for rank in group}
    for name in sorted(n for n, m in master_params.items() if kind_of(m) == kind) if mesh.rank in group else ():
        mine = local_of(master_params[name]).cpu().contiguous().view(-1)
        if mesh.rank != group[0]:
            dist.send(mine, group[0], group=mesh.host_group)
            continue
        copies = {group[0]: mine}
        for rank in group[1:]:
            copies[rank] = torch.empty_like(mine)
            dist.recv(copies[rank], rank, group=mesh.host_group)
        odd = torch.stack([copies[rank] != mine for rank in group[1:]]).any(0)
        for at in odd.nonzero().view(-1)[: MOST - len(places)].tolist():
            places.append((name, at))
            for rank, copy in copies.items():
                held[rank].append(float(copy[at]))
    told: list[object] = mesh.all_gather_object((places, held))
    return told[group[0]]  # type: ignore[return-value]


@torch.no_grad()
def values_at(master_params: Mapping[str, Tensor], places: list[Place]) -> list[float]:
    """What this rank holds there now."""
    return [float(local_of(master_params[name]).reshape(-1)[at]) for name, at in places]


def wrong_ones(doubt: Doubt, right: list[float]) -> list[int]:
    """The ranks whose values are far from the right ones, beside others whose are not; none where that is not clear."""
    off = {rank: sum(abs(h - r) for h, r in zip(held, right, strict=True)) for rank, held in doubt.held.items()}
    least = min(off.values())
    far = [rank for rank, distance in off.items() if not distance <= CLEAR * least]  # NaN is far
    return far if len(far) < len(off) else []
