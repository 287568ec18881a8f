"""Checksums of a rank's weights: cheap enough for every few steps; any flipped bit changes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.shards import local_of, shard_of

Kind = tuple[str, ...]
"""The axes over which a weight is sharded; ranks with the same shard of one such weight share all of them."""


def kind_of(master: Tensor) -> Kind:
    if not isinstance(master, DTensor):
        return ()
    names = master.device_mesh.mesh_dim_names or ()
    return tuple(sorted(n for n, p in zip(names, master.placements, strict=True) if not p.is_replicate()))


class Checksums:
    """Sums of the bits of each weight, and of all weights of a kind."""

    def __init__(self, master_params: Mapping[str, Tensor]) -> None:
        self.master_params = dict(master_params)
        self.names = list(self.master_params)
        self.kinds = sorted({kind_of(m) for m in self.master_params.values()})
        self.members = [[i for i, m in enumerate(self.master_params.values()) if kind_of(m) == k] for k in self.kinds]
        self.held: dict[Kind, str] = {}
        """For each kind, a hash of the shards that this rank holds."""
        for kind, members in zip(self.kinds, self.members, strict=True):
            shards = [(self.names[i], shard_of(self.master_params[self.names[i]])) for i in members]
            listed = repr([(name, shard.offset, shard.size) for name, shard in shards])
            self.held[kind] = hashlib.sha256(listed.encode()).hexdigest()[:16]
        self._factors: list[Tensor] = []
        """For each kind, odd factors of its weights' sums and zeros, on the weights' device."""
        self._views: list[tuple[int, np.ndarray]] = []

    def each(self) -> Tensor:
        """One sum for each weight, [weights], on the weights' device."""
        locals_ = [local_of(m.detach()) for m in self.master_params.values()]
        if locals_ and locals_[0].is_cuda:
            return torch.stack([_device_sum(t) for t in locals_])
        if [v[0] for v in self._views] != [t.data_ptr() for t in locals_]:
            self._views = [(t.data_ptr(), _bytes(t)) for t in locals_]
        sums = [_host_sum(view) for _, view in self._views]
        return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))

    def by_kind(self, each: Tensor) -> Tensor:
        """For each kind the upper and lower half of one sum, as doubles, [2 · kinds]."""
        if not self._factors:
            found = [[2 * i + 1 if i in set(of) else 0 for i in range(len(self.names))] for of in self.members]
            self._factors = [torch.tensor(factors, device=each.device) for factors in found]
        totals = torch.stack([(each * factors).sum() for factors in self._factors])
        return torch.stack([(totals >> 32) & 0xFFFFFFFF, totals & 0xFFFFFFFF], 1).reshape(-1).double()


def _bytes(t: Tensor) -> np.ndarray:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy()


def _host_sum(view: np.ndarray) -> int:
    whole = view.size // 8 * 8
    total = int(np.add.reduce(view[:whole].view(np.uint64))) if whole else 0
    return (total + int.from_bytes(view[whole:].tobytes(), "little")) % 2**64


def _device_sum(t: Tensor) -> Tensor:
    flat = t.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64).sum()
    return words + flat[whole:].long().sum() if whole < flat.numel() else words
