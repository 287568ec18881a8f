"""Replicas whose weights differ without a majority: find the wrong one by recomputing the steps.

The steps since the last agreement are computed again; a replica whose earlier values are far from the result was wrong.
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

MAX_DIFFERENCES = 64
"""Differing values that are kept."""
CLEAR_RATIO = 4.0
"""How many times farther off than the best rank a rank must be to be named."""

Element = tuple[str, int]
"""A weight's name and an index into this rank's shard of it."""


@dataclass(frozen=True)
class ReplicaMismatch:
    """A mismatch after a step; `held` are each rank's values at the differing elements, read when `read_at` steps were
    done."""

    step: int
    read_at: int
    group: tuple[int, ...]
    tries: int
    places: list[Element]
    held: dict[int, list[float]]


@torch.no_grad()
def find_differences(
    master_params: Mapping[str, Tensor], kind: Kind, group: tuple[int, ...], mesh: Mesh
) -> tuple[list[Element], dict[int, list[float]]]:
    """The elements in which these ranks' weights differ, and each rank's values. Collective; all ranks get the result.

    Weights are sent through the host, one by one, to the first rank of the group.
    """
    places: list[Element] = []
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
        outliers = torch.stack([copies[rank] != mine for rank in group[1:]]).any(0)
        for at in outliers.nonzero().view(-1)[: MAX_DIFFERENCES - len(places)].tolist():
            places.append((name, at))
            for rank, copy in copies.items():
                held[rank].append(float(copy[at]))
    places, pairs = mesh.all_gather_json((places, list(held.items())))[group[0]]
    return [(name, at) for name, at in places], dict(map(tuple, pairs))


@torch.no_grad()
def values_at(master_params: Mapping[str, Tensor], places: list[Element]) -> list[float]:
    """This rank's current values of these elements."""
    return [float(local_of(master_params[name]).reshape(-1)[at]) for name, at in places]


def wrong_ranks(mismatch: ReplicaMismatch, right: list[float]) -> list[int]:
    """The ranks whose values are far from the right ones; empty if the result is not clear."""
    off = {rank: sum(abs(h - r) for h, r in zip(held, right, strict=True)) for rank, held in mismatch.held.items()}
    least = min(off.values())
    far = [rank for rank, distance in off.items() if not distance <= CLEAR_RATIO * least]  # NaN is far
    return far if len(far) < len(off) else []
