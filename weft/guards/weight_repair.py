"""Repair a rank's weights from a replica."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from weft.guards.checksum import Kind, kind_of
from weft.mesh import Mesh


@torch.no_grad()
def copy_shards(
    shards: Mapping[str, Tensor], master_params: Mapping[str, Tensor], kind: Kind, source: int, wrong: tuple[int, ...],
    mesh: Mesh,
) -> None:  # fmt: skip
    """Copy the weights of one kind and their optimizer state from `source` to the `wrong` ranks.

    Every rank calls it. Data goes through the host group, which connects any pair of ranks.
    """
    if mesh.rank != source and mesh.rank not in wrong:
        return
    names = {name for name, master in master_params.items() if kind_of(master) == kind}
    for key in sorted(shards):
        if _owner(key, names) is None:
            continue
        shard = shards[key]
        if mesh.rank == source:
            held = shard.cpu().contiguous()
            for rank in wrong:
                dist.send(held, rank, group=mesh.host_group)
        else:
            into = torch.empty(shard.shape, dtype=shard.dtype)
            dist.recv(into, source, group=mesh.host_group)
            shard.copy_(into)


def _owner(key: str, names: set[str]) -> str | None:
    """The weight that a state tensor belongs to."""
    section, _, rest = key.partition(".")
    if section not in ("model", "optim", "ema"):
        return None
    if rest in names:
        return rest
    owner = rest.rpartition(".")[0]
    return owner if section == "optim" and owner in names else None
