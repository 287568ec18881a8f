"""Muon for sharded weights: the momentum is sharded, the update is computed from the whole matrix.

torch's Muon runs Newton–Schulz on DTensors, whose products are split differently in each layout; with bf16 rounding the
layouts would then give different runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm import foreach_internals as foreach
from weft.comm.shards import local_of, shard_of
from weft.extensions.optimizers.matrix_updates import Source, batches
from weft.job.schema import Optim
from weft.mesh import Mesh
from weft.optim.gradient_clip import taken_share, zeroed_if_skipped
from weft.planner.engine_constants import MUON_ITERATIONS, UPDATED_ELEMENTS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose slope at zero is steepest (Jordan et al. 2024)."""
MIN_NORM = 1e-7
MAX_BATCH = 256
"""Matrices that are processed together, at most."""


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), with AdamW's update size (Liu et al. 2025, §2.2)."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, weight_decay: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    found_inf: Tensor | None = None
    """A tensor that is 1 if this step is skipped."""

    mesh: Mesh | None = None
    """Ranks with the same shard of a weight take turns: one computes an update and sends it to the others."""

    products = torch.float32
    """Dtype of the products."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: p.shape)
            if params:
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update the weights of a group: their momenta at once, which takes no memory, then batches of weights."""
        lr, momentum = group["lr"], group["momentum"]
        weights, grads = [local_of(p) for p in params], zeroed_if_skipped(params, self.found_inf)
        taken = taken_share(self.found_inf, weights[0].device)
        for param in params:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        means = [local_of(self.state[p]["momentum_buffer"]) for p in params]
        foreach.foreach_mul_(means, 1 - (1 - momentum) * taken)
        foreach.foreach_add_scaled_(means, grads, 1 - momentum)
        foreach.foreach_mul_(weights, 1 - lr * group["weight_decay"] * taken)
        sources = [Source.of(self.mesh, param, index) for index, param in enumerate(params, group.get("first", 0))]
        ranks = max(source.ranks for source in sources)  # each computes an equal share of a batch
        for some in batches([p.numel() for p in params], ranks * UPDATED_ELEMENTS, least=ranks):
            updates = foreach.foreach_lerp(grads[some], means[some], momentum)
            _orthogonalise_shards_(params[some], updates, sources[some], self.products)
            foreach.foreach_mul_(updates, taken)
            factors = [-lr * 0.2 * math.sqrt(max(p.shape[-2:])) for p in params[some]]
            foreach.foreach_mul_(updates, factors)
            foreach.foreach_add_scaled_(weights[some], updates)


def _orthogonalise_shards_(
    params: list[Tensor], shards: list[Tensor], sources: list[Source], dtype: torch.dtype
) -> None:
    """Replace shards of matrices by those of the orthogonalised matrices, which one rank computes and sends."""
    wholes = {i: _matrices(p, shards[i]) for i, p in enumerate(params) if sources[i].here}
    orthogonalise_((matrix for whole in wholes.values() for matrix in (whole if whole.dim() == 3 else [whole])), dtype)
    for index, (shard, source) in enumerate(zip(shards, sources, strict=True)):
        if index in wholes and wholes[index] is not shard:
            shard.copy_(wholes[index][shard_of(params[index]).box])
        source.send(shard)


def _matrices(param: Tensor, local: Tensor) -> Tensor:
    """The whole matrix of which a rank has a shard, or a stack of whole matrices, of all experts or the rank's own."""
    shard = shard_of(param)
    return local if param.dim() == 3 and shard.size[1:] == tuple(shard.shape[1:]) else shard.whole(local)


def orthogonalise_(matrices: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Replace each matrix by approximately the nearest one with singular values of 1.

    Those of one shape are processed together on GPUs, and always as many, where zeros take the places that are left:
    libraries may choose products that round in another way if a batch has another size.
    """
    shapes: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        if matrix.numel():
            shapes.setdefault(matrix.shape, []).append(matrix)
    for shape, members in shapes.items():
        together = batch_size(shape, members[0].device)
        for first in range(0, len(members), together):
            some = members[first : first + together]
            if together == 1:
                some[0].copy_(newton_schulz(some[0].to(dtype)))
                continue
            stack = some[0].new_zeros((together, *shape), dtype=dtype)
            foreach.foreach_copy_(stack[: len(some)].unbind(), some)
            foreach.foreach_copy_(some, newton_schulz(stack)[: len(some)].unbind())


def batch_size(shape: torch.Size, device: torch.device) -> int:
    """How many matrices of a shape are processed together: the same number whatever is updated in a step."""
    return min(max(1, UPDATED_ELEMENTS // shape.numel()), MAX_BATCH) if device.type == "cuda" else 1


def newton_schulz(x: Tensor) -> Tensor:
    """A matrix, or each one of a stack [matrices, rows, columns], orthogonalised."""
    multiply, multiply_add = (torch.mm, torch.addmm) if x.dim() == 2 else (torch.bmm, torch.baddbmm)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norms = foreach.sums_of_squares(x.reshape(-1, *x.shape[-2:]).unbind()).sqrt().to(x.dtype)
    x = x / norms.view(*x.shape[:-2], 1, 1).clamp(min=MIN_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(MUON_ITERATIONS):
        gram = multiply(x, x.mT)
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def build(optim: Optim, groups: list[dict[str, Any]]) -> Muon:
    """The optimizer of a job's parameter groups."""
    return Muon(groups, optim.lr, optim.momentum, optim.weight_decay)
