"""Moves experts between ranks at a checkpoint, and replicates hot ones, so that the ranks have even loads.

Experts of a block differ only in their weights. If the router's rows, the biases, the weights and their optimizer and
average states are permuted together, the model computes the same. An expert's index determines its rank, so permuting
them moves a hot expert to a rank whose others are idle. An expert too hot for one rank is replicated
(parallel/expert/replication.py), and its tensors stay where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.shards import local_of, shard_of
from weft.planner.advice.expert_placement import ExpertPlacement, cost_of, fullest, place
from weft.planner.plan import Plan
from weft.training.state import State

PER_EXPERT = ("router.", "experts.", "bias", "past")
"""Names of the tensors of a mixture that have a row for each expert."""


def rebalance(state: State, plan: Plan) -> dict[str, float] | None:
    """Move the experts of every block whose most loaded rank would get less by the fraction `ep_rebalance`.

    Returns the largest load of a rank over the mean, before and after, in the worst block; None where nothing changed.
    All ranks know the load of all blocks, so they decide the same.
    """
    load = state.model.load
    if load is None or not load.blocks or not load.steps:
        return None
    # what the ranks of one ep group compute in one pass
    passes = load.steps * plan.accumulation * plan.world // (plan.pp * plan.ep)
    table = (load.since[:, :-3] / passes).tolist()
    load.forget()
    before, after, moves = [], [], dict[int, ExpertPlacement]()
    for index, counts in zip(load.blocks, table, strict=True):
        there = load.copies.get(index, ())
        found = place(counts, plan.ep, moves=plan.ep_moves, room=plan.ep_copies, price=plan.ep_copy_rows)
        now = cost_of(counts, plan.ep, there, plan.ep_copy_rows)
        if sum(counts) and found.rows + found.cost <= now * (1 - plan.ep_rebalance):
            moves[index] = found
            before.append(fullest(counts, plan.ep, there))
            after.append(fullest([counts[e] for e in found.order], plan.ep, found.copies))
    if not moves:
        return None
    for index in moves.keys() & load.parts.keys():
        if moves[index].order != sorted(moves[index].order):
            _reorder(state, index, moves[index].order)
    load.place(load.copies | {index: found.copies for index, found in moves.items()})
    state.model.refresh()
    copies = sum(len(pairs) for pairs in load.copies.values())
    return {"blocks": len(moves), "before": max(before), "after": max(after), "copies": copies}


@torch.no_grad()
def _reorder(state: State, block: int, order: list[int]) -> None:
    """Permute every tensor of a block that has a row for each expert."""
    prefix = f"blocks.{block}.mlp."
    for name, tensor in sorted(state.tensors().items()):
        kind, _, rest = name.partition(".")
        ours = kind in ("model", "buffer", "optim", "ema") and rest.startswith(tuple(prefix + m for m in PER_EXPERT))
        # Adafactor's column statistics have no expert dimension
        if ours and tensor.dim() and tensor.shape[0] == len(order):
            _permute(tensor, order)


def _permute(tensor: Tensor, order: list[int]) -> None:
    shard, local = shard_of(tensor), local_of(tensor)
    whole = shard.whole(local.clone())
    local.copy_(whole[torch.tensor(order, device=whole.device)][shard.box])
