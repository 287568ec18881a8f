"""The global gradient norm, the same in every layout, and scaling of gradients by a factor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from weft.comm.foreach_internals import foreach_mul_, largest_of, sums_of_squares
from weft.comm.shards import local_of
from weft.mesh import Mesh


def grad_norm(
    grad_params: Iterable[Tensor],
    mesh: Mesh,
    squares: Tensor | None = None,
    squares_by_id: Mapping[int, Tensor] | None = None,
    limit: float | None = None,
) -> Tensor:
    """The 2-norm of all gradients, with the same bits on every rank. `squares` is the sum of squares of further ones;
    `squares_by_id` has those of parameters whose gradients are elsewhere, by the parameter's id. Infinite if an element
    is `limit` or larger.

    Of the ranks that hold the same shard one counts it: replicas that each computed the norm could differ in its last
    bit, and then in every weight.
    """
    known = squares_by_id or {}
    params = [p for p in grad_params if (p.grad is not None or id(p) in known) and mesh.holds_first(p)]
    counted = [local_of(p.grad) for p in params if p.grad is not None and id(p) not in known]
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    computed: list[Tensor] = list(squares_within(counted, limit).unbind()) if counted else []
    if params:  # in one order, wherever the gradients are
        total += torch.stack([known[id(p)] if id(p) in known else computed.pop(0) for p in params]).sum()
    if squares is not None:
        total += squares
    return mesh.sum_over_model(total).sqrt().float()


def squares_within(grads: Sequence[Tensor], limit: float | None) -> Tensor:
    """The sum of squares of each gradient; infinite if an element of any of them is `limit` or larger."""
    squares = sums_of_squares(grads)
    return squares if limit is None else torch.where(largest_of(grads) >= limit, torch.inf, squares)


def scale_grads(params: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply every gradient in place."""
    grads = [local_of(p.grad) for p in params if p.grad is not None]
    if grads:
        foreach_mul_(grads, factor)


def zeroed_if_skipped(params: Iterable[Tensor], found_inf: Tensor | None) -> list[Tensor]:
    """This rank's gradients, set to zero if the step is skipped, so that values that are not finite do not spread."""
    grads = [local_of(p.grad) for p in params if p.grad is not None]
    if found_inf is not None:
        skipped = found_inf > 0
        for grad in grads:
            grad.masked_fill_(skipped, 0.0)
    return grads


def taken_share(found_inf: Tensor | None, device: torch.device) -> Tensor:
    """1, or 0 if the step is skipped, without synchronisation."""
    return torch.ones((), device=device) if found_inf is None else 1.0 - found_inf
