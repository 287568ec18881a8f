"""What a checkpoint may lack: what compression owes, exact in the layout that wrote it, and fp8's maxima.

Every rank that sums gradients holds a share of what is owed of a weight (`residual.HOLDER.WEIGHT`). Where there are as
many holders as before each gets its own share back; else all shares are added up, and each gets an equal part.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.format import SavedCheckpoint
from weft.checkpoint.reader import Index
from weft.comm.shards import local_of
from weft.training.state import OWED, State


def load_owed(checkpoints: Checkpointer, found: SavedCheckpoint, state: State) -> str | None:
    """Take in what a checkpoint says is owed. Collective; returns a note where a person should know of it."""
    index = Index(found.path)
    holders: dict[str, set[int]] = defaultdict(set)
    for name in index.tensors:
        if name.startswith("residual."):
            _, holder, weight = name.split(".", 2)
            holders[weight].add(int(holder))
    if not state.model.compressors or not holders:
        return "what compression still owed is dropped: gradients are not compressed now" if holders else None
    mine = {n: t for n, t in state.tensors().items() if n.startswith(OWED)}
    now: dict[str, set[int]] = defaultdict(set)
    for named in state.mesh.all_gather_object([n for n in mine if n.startswith("residual.")]):
        for name in named if isinstance(named, list) else []:
            _, holder, weight = name.split(".", 2)
            now[weight].add(int(holder))
    alike = {n for n in mine if n in index.tensors and index.tensors[n].size == mine[n].shape}
    exact = {n: mine[n] for n in alike if not n.startswith("residual.") or now[_weight(n)] == holders[_weight(n)]}
    checkpoints.load(found, exact)
    moved = {n for n in mine if n.startswith("residual.") and n not in exact and _weight(n) in holders}
    if any(state.mesh.all_gather_object(bool(moved))):
        for name in moved:
            local_of(mine[name]).zero_()
        for one in sorted(set().union(*holders.values())):
            read = {f"residual.{one}.{_weight(n)}": n for n in moved if one in holders[_weight(n)]}
            share: dict[str, Tensor] = {name: torch.empty_like(mine[n]) for name, n in read.items()}
            checkpoints.load(found, share)
            for name, n in read.items():
                local_of(mine[n]).add_(local_of(share[name]), alpha=1 / len(now[_weight(n)]))
    state.adopt_owed({n: t for n, t in mine.items() if n in exact or n in moved})
    return None


def load_maxima(checkpoints: Checkpointer, found: SavedCheckpoint, state: State) -> None:
    """Take in fp8's maxima, where a checkpoint has them of every layer and over as many steps. Collective."""
    mine, index = state.model.maxima(), Index(found.path)
    alike = all(n in index.tensors and index.tensors[n].size == t.shape for n, t in mine.items())
    for tensor in mine.values():
        tensor.zero_()
    said = state.mesh.all_gather_object(alike if mine else None)
    if any(said) and False not in said:
        checkpoints.load(found, mine)
    state.model.recall_maxima()


def _weight(name: str) -> str:
    return name.split(".", 2)[2]
