"""Snapshots of another layout, in the memories of several nodes, made into an ordinary checkpoint.

A checkpoint has no layout: what the ranks of a lost world had, the ranks of a smaller one read from it as they need it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.contents import CheckpointContents
from weft.checkpoint.snapshot_file import Places, find_sealed, read_table
from weft.checkpoint.snapshot_replication import held_files, newest_whole
from weft.comm.shards import shard_of
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import Plan

Told = tuple[int, dict[str, int], int, int]
"""Attempt, axes, step and rank of a shard."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank's snapshot, in this node's memory."""

    path: Path
    step: int
    places: Places

    @property
    def axes(self) -> dict[str, int]:
        axes: dict[str, int] = self.places.plan["axes"]
        return axes


def places_of(rank: int, attempt: int, job: Job, plan: Plan, tensors: Mapping[str, Tensor]) -> Places:
    """What this rank's shards are shards of."""
    boxes = {name: (list((p := shard_of(t)).shape), list(p.offset)) for name, t in tensors.items()}
    return Places(rank, attempt, job.model_dump(mode="json"), plan.to_json(), boxes)


def find_shards(memory: Path) -> list[RankSnapshot]:
    """All that this node holds: its own ranks' and its neighbour's."""
    found = [
        RankSnapshot(sealed.path, sealed.step, places)
        for sealed in find_sealed(memory)
        if (places := Places.read(memory / f"places-{sealed.rank}.json")) is not None
    ]
    for attempt, rank, step, path in held_files(memory / "held"):
        if (places := Places.read(memory / "held" / f"{attempt}-{rank}.json")) is not None:
            found.append(RankSnapshot(path, step, places))
    return found


def save_shards(memory: Path, checkpoints: Checkpointer, mesh: Mesh, local_ranks: int, newer_than: int) -> int | None:
    """Write the newest step that the nodes' memories hold together as a checkpoint, if the disk has none as new.

    Collective; every rank brings its share of what its node holds. Returns the step, or None.
    """
    local = int(os.environ.get("LOCAL_RANK", mesh.rank))
    mine = sorted(find_shards(memory), key=lambda s: (s.step, s.places.rank, s.path.name))[local::local_ranks]
    told = mesh.all_gather_object([(s.places.attempt, s.axes, s.step, s.places.rank) for s in mine])
    everyone = [entry for entries in cast(list[list[Told]], told) for entry in entries]
    if not everyone:
        return None
    axes = max(everyone, key=lambda entry: entry[0])[1]  # of the last layout: another's shards are no part of it
    held = [(step, rank) for _, layout, step, rank in everyone if layout == axes]
    chosen = newest_whole(held, axes)
    if chosen is None or chosen <= newer_than:
        return None
    bring = [shard for shard in mine if shard.step == chosen and shard.axes == axes]
    there = {rank for step, rank in held if step == chosen}
    contents = SnapshotContents(bring, _absent(there, axes, mine) if mesh.rank == 0 else {})
    metas = mesh.all_gather_object(contents.meta)
    meta = next(m for m in cast(list[dict[str, Any] | None], metas) if m is not None)
    checkpoints.save_contents(chosen, contents, meta)
    return chosen if checkpoints.durable == chosen else None


def _absent(there: set[int], axes: Mapping[str, int], bring: list[RankSnapshot]) -> dict[str, Tensor]:
    """Random states of ranks that are gone, as they begin: only a person's own module may use them."""
    world = 1
    for degree in axes.values():
        world *= degree
    seed = bring[0].places.job["train"]["seed"] if bring else 0
    generators = {r: torch.Generator().manual_seed(seed + r) for r in range(world) if r not in there}
    return {f"random.{r}": g.get_state() for r, g in generators.items()}


class SnapshotContents(CheckpointContents):
    """The contents of snapshot files, which are shards of a layout that is gone."""

    def __init__(self, shards: list[RankSnapshot], more: dict[str, Tensor]) -> None:
        super().__init__(more, copy=False)
        self.meta: dict[str, Any] | None = None
        try:
            for shard in shards:
                self._add_file(shard)
        except Exception as error:
            self.error = error

    def _add_file(self, shard: RankSnapshot) -> None:
        table = read_table(shard.path)
        if table is None:
            raise ValueError(f"{shard.path} is no longer whole")
        entries, counts = table
        self.meta = {**counts, "job": shard.places.job, "plan": shard.places.plan}
        memory = torch.from_file(str(shard.path), shared=False, size=shard.path.stat().st_size, dtype=torch.uint8)
        for name, dtype, shape, at in entries:
            kind = getattr(torch, dtype)
            count = int(torch.Size(shape).numel())
            tensor = memory[at : at + count * kind.itemsize].view(kind).view(shape)
            full, offset = shard.places.boxes[name]
            self._add(name, tensor, tuple(full), tuple(offset))
