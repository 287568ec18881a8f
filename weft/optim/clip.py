"""One gradient norm that is the same number in every layout, and one multiplication that applies it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.shards import local_of
from weft.mesh import Mesh


def cut_axes(x: Tensor) -> tuple[str, ...]:
    """The axes of the mesh over which a tensor is cut; on the others every rank has the same."""
    if not isinstance(x, DTensor):
        return ()
    names = x.device_mesh.mesh_dim_names or ()
    return tuple(n for n, p in zip(names, x.placements, strict=True) if not p.is_replicate())


def grad_norm(grad_params: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """The 2-norm of all gradients together: equally cut tensors are summed over just the axes that cut them."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for leaf in grad_params:
        if leaf.grad is not None:
            groups.setdefault(cut_axes(leaf), []).append(local_of(leaf.grad))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for axes in sorted(groups):
        norms = torch.stack(torch._foreach_norm(groups[axes], 2, dtype=torch.float32))
        square = norms.double().square().sum()
        for name in axes:
            axis = mesh.axis(name)
            if axis is not None:
                axis.all_reduce(square)
        total += square
    stages = mesh.axis("pp")
    if stages is not None:  # every stage has weights of its own
        stages.all_reduce(total)
    return total.sqrt().float()


def scale_grads(params: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply every gradient in place."""
    grads = [local_of(p.grad) for p in params if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


def passed(grad: Tensor, found_inf: Tensor | None) -> Tensor:
    """A gradient as it is, or zeros where the step is passed over: what is not finite would spread through any sum."""
    return grad if found_inf is None else torch.where(found_inf > 0, torch.zeros_like(grad), grad)
