"""Adafactor (Shazeer & Stern 2018) for sharded weights: only sums of rows, columns and scalars are communicated.

The same algorithm as torch.optim.Adafactor, whose in-place norms DTensor does not support. Operations are on lists of
tensors, and scalars of all weights are one vector: a GPU would wait for the host otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm import foreach_internals as foreach
from weft.comm.shards import LocalShard, local_of, shard_of
from weft.extensions.optimizers.matrix_updates import batches, sum_over_shards, take_from_first
from weft.job.schema import Optim
from weft.mesh import Mesh
from weft.optim.gradient_clip import taken_share, zeroed_if_skipped

BETA2_DECAY = -0.8
MIN_PARAMETER_SCALE = 1e-3
"""ε₂: lower bound of a parameter's scale."""


class Adafactor(torch.optim.Optimizer):
    """Second moments of a matrix as the product of row and column means."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    found_inf: Tensor | None = None
    """A tensor that is 1 if this step is skipped."""
    mesh: Mesh | None = None
    """Ranks with the same shard of a weight take the sums of the first of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self._update(params, group["lr"], group["weight_decay"])

    def _update(self, params: list[Tensor], lr: float, decay: float) -> None:
        """Update the weights of a group, which are all matrices (or stacks of them) or all vectors."""
        weights, grads = [local_of(p) for p in params], zeroed_if_skipped(params, self.found_inf)
        taken, shards = taken_share(self.found_inf, weights[0].device), [shard_of(p) for p in params]
        sums = [[square] for square in foreach.sums_of_squares(weights).float().unbind()]
        if params[0].dim() > 1:
            for own, more in zip(sums, _row_and_column_sums(grads, shards), strict=True):
                own += more
        sum_over_shards(self.mesh, sums, params)
        steps = self._update_moments(params, shards, grads, sums, taken)
        roots = self._roots(params, shards)

        def directions(some: slice) -> list[Tensor]:
            """Normalised gradients; computed twice in a step instead of stored, but for the last ones."""
            out = foreach.foreach_mul(*(each[some] for each in roots))
            foreach.foreach_clamp_max_(out, 1 / torch.finfo(params[0].dtype).eps)
            foreach.foreach_mul_(out, grads[some])
            return out

        parts, part_squares = batches([w.numel() for w in weights]), []
        found: list[Tensor] = []
        for part in parts:
            found = []  # frees the last ones
            found = directions(part)
            part_squares.append(foreach.sums_of_squares(found))
        squares = [[square] for square in torch.cat(part_squares).float().unbind()]
        sum_over_shards(self.mesh, squares, params)
        rates = (steps**-0.5).clamp(max=lr).float() * taken
        scales = _root_mean(sums, shards).clamp(min=MIN_PARAMETER_SCALE) * rates
        factors = list((-scales / _root_mean(squares, shards).clamp(min=1.0)).unbind())
        foreach.foreach_mul_(weights, 1 - lr * decay * taken)
        for part in reversed(parts):
            found = found or directions(part)
            foreach.foreach_mul_(found, factors[part])
            foreach.foreach_add_scaled_(weights[part], found)
            found = []

    def _update_moments(
        self, params: list[Tensor], shards: list[LocalShard], grads: list[Tensor], sums: list[list[Tensor]],
        taken: Tensor,
    ) -> Tensor:  # fmt: skip
        """Update the second moments. Returns the number of steps of each weight."""
        states = [self.state[p] for p in params]
        for param, state, found in zip(params, states, sums, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=param.device)
                if param.dim() > 1:
                    state["row_var"], state["col_var"] = torch.zeros_like(found[1]), torch.zeros_like(found[2])
                else:
                    state["variance"] = torch.zeros_like(param)
        foreach.foreach_add_([state["step"] for state in states], taken)
        steps = torch.stack([state["step"] for state in states]).double()
        shares = list((steps.clamp(min=1) ** BETA2_DECAY * taken).float().unbind())
        if params[0].dim() > 1:
            ends = [each for found in sums for each in found[1:]]
            foreach.foreach_mul_(ends, [1 / size for shard in shards for size in (shard.shape[-1], shard.shape[-2])])
            moments = [state[key] for state in states for key in ("row_var", "col_var")]
            foreach.foreach_lerp_(moments, ends, [share for share in shares for _ in range(2)])
        else:
            foreach.foreach_lerp_(
                [local_of(state["variance"]) for state in states], foreach.foreach_mul(grads, grads), shares
            )
        return steps

    def _roots(self, params: list[Tensor], shards: list[LocalShard]) -> tuple[list[Tensor], list[Tensor]]:
        """Factors whose product is 1 / √variance on this rank: of rows and columns, or of elements and 1."""
        states, eps = [self.state[p] for p in params], torch.finfo(params[0].dtype).eps
        if params[0].dim() < 2:
            one = torch.ones((), device=params[0].device)
            return foreach.foreach_rsqrt([local_of(state["variance"]) for state in states]), [one] * len(params)
        means = [[state["row_var"].mean(-2, keepdim=True)] for state in states]
        take_from_first(self.mesh, means, params)
        rows = [state["row_var"] / mean.clamp(min=eps) for state, [mean] in zip(states, means, strict=True)]
        rows, columns = foreach.foreach_rsqrt(rows), foreach.foreach_rsqrt([state["col_var"] for state in states])
        for index, shard in enumerate(shards):
            if shard.groups:
                rows[index] = rows[index][_without_box(shard.box, -1)]
                columns[index] = columns[index][_without_box(shard.box, -2)]
        return rows, columns


def build(optim: Optim, groups: list[dict[str, Any]]) -> Adafactor:
    """The optimizer of a job's parameter groups."""
    return Adafactor(groups, optim.lr)


def _row_and_column_sums(grads: list[Tensor], shards: list[LocalShard]) -> list[list[Tensor]]:
    """This rank's part of the sums of squares of each gradient's rows and columns."""
    sums = [foreach.sums_of_squares_along(grad, dim) for grad in grads for dim in (-1, -2)]
    pairs = [sums[first : first + 2] for first in range(0, len(sums), 2)]
    for pair, shard in zip(pairs, shards, strict=True):
        for index, dim in enumerate((-1, -2)) if shard.groups else ():
            whole = pair[index].new_zeros(_without(shard.shape, dim))
            whole[_without_box(shard.box, dim)] = pair[index]
            pair[index] = whole
    return pairs


def _root_mean(squares: list[list[Tensor]], shards: list[LocalShard]) -> Tensor:
    """The square roots of the means of all weights, from sums of squares that come first in each list."""
    means = [each[0] for each in squares]
    foreach.foreach_mul_(means, [1 / math.prod(shard.shape) for shard in shards])
    return torch.stack(means).sqrt()


def _without(shape: torch.Size, dim: int) -> list[int]:
    out = list(shape)
    out[dim] = 1
    return out


def _without_box(box: tuple[slice, ...], dim: int) -> tuple[slice, ...]:
    out = list(box)
    out[dim] = slice(0, 1)
    return tuple(out)
