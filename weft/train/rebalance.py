"""At a checkpoint: give experts other numbers, and so other ranks, where that makes the ranks' loads more even.

Experts of a block are alike but for their weights. If the router's rows, the biases, the weights and all that the
optimizer and the average hold of them are put into another order together, the model says what it said before. Which
rank holds an expert follows from its number, so a hot one can be given a rank whose others are idle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.pieces import local_of, piece_of
from weft.train.state import State

MOVED = ("router.", "experts.", "bias", "past")
"""What of a mixture has a row for each expert."""


def better_order(load: list[float], ranks: int) -> list[int]:
    """Which expert should stand at each place: the hottest first, each to the rank with the least so far and room."""
    room = len(load) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        free = [r for r in range(ranks) if len(held[r]) < room]
        held[min(free, key=lambda r: (sum(load[e] for e in held[r]), r))].append(expert)
    return [expert for each in held for expert in sorted(each)]


def fullest(load: list[float], ranks: int) -> float:
    """Load of the fullest rank over the mean."""
    room = len(load) // ranks
    sums = [sum(load[i : i + room]) for i in range(0, len(load), room)]
    return max(sums) * ranks / max(sum(sums), 1e-9)


def rebalance(state: State, ranks: int, least: float) -> dict[str, float] | None:
    """Move experts of the blocks where the fullest rank would have less load by at least the share `least`.

    Returns the worst block's fullest rank over the mean, before and after; None where nothing moved. All ranks know the
    load of all blocks, and so decide alike.
    """
    load = state.woven.load
    if load is None or not load.blocks:
        return None
    table, before, after, moves = load.since[:, :-3].tolist(), [], [], dict[int, list[int]]()
    load.since.zero_()
    for index, counts in zip(load.blocks, table, strict=True):
        order = better_order(counts, ranks)
        then = fullest([counts[e] for e in order], ranks)
        now = fullest(counts, ranks)
        if sum(counts) and then <= now * (1 - least):
            moves[index] = order
            before.append(now)
            after.append(then)
    if not moves:
        return None
    for index in moves.keys() & load.parts.keys():
        _reorder(state, index, moves[index])
    state.woven.refresh()
    return {"blocks": len(moves), "before": max(before), "after": max(after)}


@torch.no_grad()
def _reorder(state: State, block: int, order: list[int]) -> None:
    """Put all that a block has by expert into another order, one tensor after the other."""
    prefix = f"blocks.{block}.mlp."
    for name, tensor in sorted(state.tensors().items()):
        kind, _, rest = name.partition(".")
        ours = kind in ("model", "buffer", "optim", "ema") and rest.startswith(tuple(prefix + m for m in MOVED))
        if ours and tensor.dim() and tensor.shape[0] == len(order):  # what Adafactor keeps by column has no experts
            _permute(tensor, order)


def _permute(tensor: Tensor, order: list[int]) -> None:
    piece, local = piece_of(tensor), local_of(tensor)
    whole = piece.whole(local.clone())
    local.copy_(whole[torch.tensor(order, device=whole.device)][piece.box])
