"""Which shard of a tensor this rank holds, and sums over the ranks that hold the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.dtensor_internals import local_shape_and_offset, local_tensor


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that one rank holds, and the groups of ranks that hold the rest."""

    shape: torch.Size
    """The shape of the whole tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The shard as an index into the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def sum(self, x: Tensor) -> Tensor:
        """Sum in place over the ranks of all groups."""
        for group in self.groups:
            dist.all_reduce(x, group=group)
        return x

    def whole(self, local: Tensor) -> Tensor:
        """The whole tensor, on every rank."""
        if not self.groups:
            return local
        out = local.new_zeros(self.shape)
        out[self.box] = local
        return self.sum(out)


def shard_of(tensor: Tensor) -> LocalShard:
    """This rank's shard of a tensor; a plain tensor is one shard."""
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.shape, (0,) * tensor.dim(), tuple(tensor.shape), ())
    size, offset = local_shape_and_offset(tensor)
    groups = tuple(tensor.device_mesh.get_group(i) for i, p in enumerate(tensor.placements) if not p.is_replicate())
    return LocalShard(tensor.shape, offset, size, groups)


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """The mesh axes over which a tensor is sharded; it is replicated over the others."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(n for n, p in zip(names, tensor.placements, strict=True) if not p.is_replicate())


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, as a plain tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.requires_grad else local_tensor(tensor)  # to_local would call autograd


def like(local: Tensor, other: Tensor) -> Tensor:
    """A local tensor laid out as `other`: a DTensor with its mesh and placements, or plain."""
    if not isinstance(other, DTensor):
        return local
    return DTensor.from_local(
        local, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )


def placed_like(grad: Tensor, weight: Tensor) -> Tensor:
    """A gradient with the placements of its weight: torch 2.11 replicates an unevenly sharded one when it copies it."""
    if isinstance(grad, DTensor) and isinstance(weight, DTensor) and grad.placements != weight.placements:
        return grad.redistribute(placements=weight.placements)
    return grad


def on_flat(tensors: Sequence[Tensor], operation: Callable[[Tensor], object]) -> list[Tensor]:
    """Run an in-place operation on the concatenation of some tensors, as one message; returns the results."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    operation(flat)
    return [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


def on_flat_(tensors: Sequence[Tensor], operation: Callable[[Tensor], object]) -> None:
    """on_flat(), with the results written to the tensors."""
    for tensor, result in zip(tensors, on_flat(tensors, operation), strict=True):
        tensor.copy_(result)
