"""Ranks whose batches end before those of others: they add gradients of zeros until all are done."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from weft.extensions.adapters.training import SpreadTraining
from weft.mesh import Mesh
from weft.planner.plan import Plan


def join_the_others(mesh: Mesh, plan: Plan, trainings: list[SpreadTraining]) -> None:
    """Take part in the sums of ranks that still have batches, then take the weights, buffers and optimizer states of
    the last of them. Each backward pass that sums gradients exchanges one flag while ranks join."""
    last = [True] * mesh.world
    while any(active := mesh.all_gather_json(False)):
        last = active
        for training in trainings:
            training.zero_grad()
            training.open(1.0 / plan.dp, last=True)
            training.close()
            training.zero_grad()
    source = last.index(True)
    for training in trainings:
        for tensor in _state(training):
            dist.broadcast(tensor, src=source)


def _state(training: SpreadTraining) -> list[Tensor]:
    tensors = [p.data for p in training.module.parameters()] + [b for b in training.module.buffers() if b.numel()]
    for optimizer in training.optimizers:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            tensors += [v for _, v in sorted(optimizer.state[param].items()) if isinstance(v, Tensor)]
    return [t for t in tensors if t.is_contiguous()]
