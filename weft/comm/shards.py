"""Which shard of a whole tensor this rank holds, and sums over the ranks that hold the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class LocalShard:
    """A box of a whole tensor, and the groups of ranks whose boxes make up the rest of it."""

    shape: torch.Size
    """The whole tensor's."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """What this rank holds, as an index into the whole."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def sum(self, x: Tensor) -> Tensor:
        """Add up in place what each shard contributes."""
        for group in self.groups:
            dist.all_reduce(x, group=group)
        return x

    def whole(self, local: Tensor) -> Tensor:
        """The whole tensor on every rank: each adds its shard to zeros."""
        if not self.groups:
            return local
        out = local.new_zeros(self.shape)
        out[self.box] = local
        return self.sum(out)


def shard_of(tensor: Tensor) -> LocalShard:
    """Where this rank's shard lies; a plain tensor is all of itself."""
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.shape, (0,) * tensor.dim(), tuple(tensor.shape), ())
    mesh, placements = tensor.device_mesh, tensor.placements
    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    groups = tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())
    return LocalShard(tensor.shape, tuple(offset), tuple(size), groups)


def local_of(tensor: Tensor) -> Tensor:
    """A tensor's shard on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(local: Tensor, model: Tensor) -> Tensor:
    """A local tensor dressed as `model` is: a DTensor of the same placement, or plain."""
    if not isinstance(model, DTensor):
        return local
    return DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
