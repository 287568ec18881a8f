"""The global gradient norm, the same in every layout, and scaling of gradients by a factor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.shards import local_of
from weft.mesh import Mesh
from weft.optim.foreach_internals import foreach_mul_, foreach_norm


def sharded_axes(x: Tensor) -> tuple[str, ...]:
    """The mesh axes over which a tensor is sharded; it is replicated over the others."""
    if not isinstance(x, DTensor):
        return ()
    names = x.device_mesh.mesh_dim_names or ()
    return tuple(n for n, p in zip(names, x.placements, strict=True) if not p.is_replicate())


def grad_norm(grad_params: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """The 2-norm of all gradients: tensors are summed over the axes that shard them."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for leaf in grad_params:
        if leaf.grad is not None:
            groups.setdefault(sharded_axes(leaf), []).append(local_of(leaf.grad))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for axes in sorted(groups):
        square = foreach_norm(groups[axes]).double().square().sum()
        for name in axes:
            axis = mesh.axis(name)
            if axis is not None:
                axis.all_reduce(square)
        total += square
    stages = mesh.axis("pp")
    if stages is not None:  # stages have different weights
        stages.all_reduce(total)
    return total.sqrt().float()


def scale_grads(params: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply every gradient in place."""
    grads = [local_of(p.grad) for p in params if p.grad is not None]
    if grads:
        foreach_mul_(grads, factor)


def zero_if_skipped(grad: Tensor, found_inf: Tensor | None) -> Tensor:
    """The gradient, or zeros if the step is skipped, so that values that are not finite do not spread."""
    return grad if found_inf is None else torch.where(found_inf > 0, torch.zeros_like(grad), grad)
