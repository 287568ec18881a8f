"""Loads state that a checkpoint may lack: compression residuals, fp8's amax history, the load of experts and the
buffers of each rank.

Every rank that sums gradients holds a residual of each weight (`residual.HOLDER.WEIGHT`). Where the holders are those
that saved it, each gets its own residual back; else all residuals are added up, and each holder gets an equal part.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.format import SavedCheckpoint
from weft.checkpoint.reader import Index
from weft.comm.shards import local_of
from weft.planner.plan import Plan
from weft.training.state import COMPRESSION, State


def load_residuals(checkpoints: Checkpointer, found: SavedCheckpoint, state: State) -> str | None:
    """Load the compression residuals of a checkpoint. Collective; returns a message for the log, if any."""
    index = Index(found.path)
    holders: dict[str, set[int]] = defaultdict(set)
    for name in index.tensors:
        if name.startswith("residual."):
            _, holder, weight = name.split(".", 2)
            holders[weight].add(int(holder))
    if not state.model.compressors or not holders:
        dropped = "the compression residuals of the checkpoint are dropped: gradients are not compressed now"
        return dropped if holders else None
    mine = {n: t for n, t in state.tensors().items() if n.startswith(COMPRESSION)}
    now: dict[str, set[int]] = defaultdict(set)
    for named in state.mesh.all_gather_json([n for n in mine if n.startswith("residual.")]):
        for name in named if isinstance(named, list) else []:
            _, holder, weight = name.split(".", 2)
            now[weight].add(int(holder))
    alike = {n for n in mine if n in index.tensors and index.tensors[n].size == mine[n].shape}
    exact = {n: mine[n] for n in alike if not n.startswith("residual.") or now[_weight(n)] == holders[_weight(n)]}
    checkpoints.load(found, exact)
    moved = {n for n in mine if n.startswith("residual.") and n not in exact and _weight(n) in holders}
    if any(state.mesh.all_gather_json(bool(moved))):
        for name in moved:
            local_of(mine[name]).zero_()
        for one in sorted(set().union(*holders.values())):
            read = {f"residual.{one}.{_weight(n)}": n for n in moved if one in holders[_weight(n)]}
            share: dict[str, Tensor] = {name: torch.empty_like(mine[n]) for name, n in read.items()}
            checkpoints.load(found, share)
            for name, n in read.items():
                local_of(mine[n]).add_(local_of(share[name]), alpha=1 / len(now[_weight(n)]))
    state.restore_compression({n: t for n, t in mine.items() if n in exact or n in moved})
    return None


def load_amax_history(checkpoints: Checkpointer, found: SavedCheckpoint, state: State) -> None:
    """Load fp8's amax history, where a checkpoint has it for every layer and as many steps. Collective."""
    mine, index = state.model.maxima(), Index(found.path)
    alike = all(n in index.tensors and index.tensors[n].size == t.shape for n, t in mine.items())
    for tensor in mine.values():
        tensor.zero_()
    found_by_rank = state.mesh.all_gather_json(alike if mine else None)
    if any(found_by_rank) and False not in found_by_rank:
        checkpoints.load(found, mine)
    state.model.restore_maxima()


def load_rank_buffers(checkpoints: Checkpointer, found: SavedCheckpoint, state: State, plan: Plan) -> None:
    """Load each rank's own buffers, where a checkpoint between two that were due has them for the same layout.
    Collective."""
    mine, index = state.rank_buffers(), Index(found.path)
    if Plan.from_json(found.meta["plan"]).axes == plan.axes:
        checkpoints.load(
            found, {n: t for n, t in mine.items() if n in index.tensors and index.tensors[n].size == t.shape}
        )


def load_expert_counts(checkpoints: Checkpointer, found: SavedCheckpoint, state: State) -> None:
    """Load the load of experts since they were last moved, where a checkpoint has it for the same blocks; else count
    from here on. Collective."""
    mine, index = state.expert_counts(), Index(found.path)
    if mine and all(n in index.tensors and index.tensors[n].size == t.shape for n, t in mine.items()):
        checkpoints.load(found, mine)
    elif state.model.load is not None:
        state.model.load.forget()


def _weight(name: str) -> str:
    return name.split(".", 2)[2]
