"""Merges the snapshots of another layout, in the memory of several nodes, into an ordinary checkpoint.

A checkpoint has no layout, so the ranks of a smaller world can load what the ranks of a lost world had.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.contents import CheckpointContents
from weft.checkpoint.snapshot_file import OWN_PREFIXES, SnapshotLayout, find_sealed, read_table
from weft.checkpoint.snapshot_replication import held_files, newest_complete
from weft.comm.shards import shard_of
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import AXES, Plan

Summary = tuple[int, dict[str, int], int, int, bool]
"""Attempt, axes, step and rank of a snapshot, and whether it has all tensors of the rank."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank's snapshot, in this node's memory."""

    path: Path
    step: int
    layout: SnapshotLayout
    whole: bool = True
    """False for a replica with only the tensors that no other rank holds."""

    @property
    def axes(self) -> dict[str, int]:
        axes: dict[str, int] = self.layout.plan["axes"]
        return axes


def snapshot_layout(rank: int, attempt: int, job: Job, plan: Plan, tensors: Mapping[str, Tensor]) -> SnapshotLayout:
    """The layout of this rank's shards."""
    boxes = {name: (list((p := shard_of(t)).shape), list(p.offset)) for name, t in tensors.items()}
    return SnapshotLayout(rank, attempt, job.model_dump(mode="json"), plan.to_json(), boxes)


def find_snapshots(memory: Path) -> list[RankSnapshot]:
    """All snapshots that this node holds: of its own ranks, and replicas of another node's."""
    found = [
        RankSnapshot(sealed.path, sealed.step, layout)
        for sealed in find_sealed(memory)
        if (layout := SnapshotLayout.read(memory / f"places-{sealed.rank}.json")) is not None
    ]
    for attempt, rank, step, path in held_files(memory / "held"):
        if (layout := SnapshotLayout.read(memory / "held" / f"{attempt}-{rank}.json")) is not None:
            table = read_table(path)
            whole = table is not None and not all(name.startswith(OWN_PREFIXES) for name, *_ in table[0])
            found.append(RankSnapshot(path, step, layout, whole))
    return found


def choose_step(held: Sequence[Summary], axes: Mapping[str, int], residuals: bool) -> int | None:
    """The newest step that can be merged; with `residuals`, if possible one with the residuals of every rank."""
    whole = [(step, rank) for _, layout, step, rank, is_whole in held if layout == axes and is_whole]
    ranks_at: dict[int, set[int]] = {}
    for _, layout, step, rank, _ in held:
        if layout == axes:
            ranks_at.setdefault(step, set()).add(rank)
    world = math.prod(axes[axis] for axis in AXES)
    with_all = [(step, rank) for step, rank in whole if len(ranks_at[step]) == world]
    chosen = newest_complete(with_all, axes) if residuals else None
    return newest_complete(whole, axes) if chosen is None else chosen


def save_merged_snapshots(
    memory: Path, checkpoints: Checkpointer, mesh: Mesh, local_ranks: int, newer_than: int, residuals: bool
) -> int | None:
    """Write the newest step of which the nodes together have all shards as a checkpoint, if newer than `newer_than`.
    `residuals`: ranks hold compression residuals.

    Collective; the ranks of a node share the snapshots that it holds. Returns the step, or None.
    """
    local = int(os.environ.get("LOCAL_RANK", mesh.rank))
    mine = sorted(find_snapshots(memory), key=lambda s: (s.step, s.layout.rank, s.path.name))[local::local_ranks]
    gathered = mesh.all_gather_json([(s.layout.attempt, s.axes, s.step, s.layout.rank, s.whole) for s in mine])
    everyone = [entry for entries in cast(list[list[Summary]], gathered) for entry in entries]
    if not everyone:
        return None
    axes = max(everyone, key=lambda entry: entry[0])[1]  # the last layout; shards of others do not belong to it
    chosen = choose_step(everyone, axes, residuals)
    if chosen is None or chosen <= newer_than:
        return None
    bring = [shard for shard in mine if shard.step == chosen and shard.axes == axes]
    there = {rank for _, layout, step, rank, _ in everyone if (layout, step) == (axes, chosen)}
    contents = SnapshotContents(bring, _absent_random_states(there, axes, mine) if mesh.rank == 0 else {})
    metas = mesh.all_gather_json(contents.meta)
    meta = next(m for m in cast(list[dict[str, Any] | None], metas) if m is not None)
    checkpoints.save_contents(chosen, contents, meta)
    return chosen if checkpoints.durable == chosen else None


def _absent_random_states(there: set[int], axes: Mapping[str, int], bring: list[RankSnapshot]) -> dict[str, Tensor]:
    """Initial random states for ranks that are gone; only a user's module may use them."""
    world = 1
    for degree in axes.values():
        world *= degree
    seed = bring[0].layout.job["train"]["seed"] if bring else 0
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
            raise ValueError(f"{shard.path} is no longer complete")
        entries, counts = table
        self.meta = {**counts, "job": shard.layout.job, "plan": shard.layout.plan}
        memory = torch.from_file(str(shard.path), shared=False, size=shard.path.stat().st_size, dtype=torch.uint8)
        for name, dtype, shape, at in entries:
            kind = getattr(torch, dtype)
            count = int(torch.Size(shape).numel())
            tensor = memory[at : at + count * kind.itemsize].view(kind).view(shape)
            full, offset = shard.layout.boxes[name]
            self._add(name, tensor, tuple(full), tuple(offset))
