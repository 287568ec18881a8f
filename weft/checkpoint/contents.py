"""What a checkpoint holds: the tensors as they are at one moment, and which part of each this rank has."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor


class Snapshot(DefaultSavePlanner):
    """The tensors as they are at this moment, and which part of each this rank holds.

    Made in the caller's thread. What goes wrong here is kept and raised inside DCP's flow, where the other ranks
    hear of it; raised at once it would leave them waiting. copy: the tensors will change while they are written.
    """

    def __init__(self, tensors: dict[str, Tensor], *, copy: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._locals: dict[str, Tensor] = {}
        self._local_plan: SavePlan | Exception
        try:
            items = create_default_local_save_plan(cast("dict[str, Any]", tensors), False).items
            items = [item for item in items if not _is_hole(item)]
            self._locals = _on_host({item.index.fqn: _local_part(tensors[item.index.fqn]) for item in items}, copy=copy)
            for item in items:
                _check_whole(item, self._locals[item.index.fqn])
            self._local_plan = SavePlan(items)
        except Exception as error:
            self._local_plan = RuntimeError(f"{type(error).__name__}: {error}")

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        if isinstance(self._local_plan, Exception):
            raise self._local_plan
        return self._local_plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                data = cast(Any, item.tensor_data)
                kind = (data.size, data.properties.dtype)
                if kinds.setdefault(item.index.fqn, kind) != kind:
                    raise ValueError(
                        f"rank {rank} gives {item.index.fqn!r} as {kind_of(*kind)}, another rank as "
                        f"{kind_of(*kinds[item.index.fqn])}; two tensors need two names"
                    )
        plans, metadata = super().create_global_plan(all_plans)
        for name, entry in metadata.state_dict_metadata.items():
            if not covered(entry):
                raise ValueError(f"the ranks together hold only a part of {name!r}")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._locals[index.fqn]


def covered(entry: Any) -> bool:
    return sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)


def kind_of(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(size)}"


def _local_part(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_host(tensors: dict[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """The tensors in host memory: copies, where copy is asked or they are elsewhere."""
    moved = {name: t if t.is_cpu and not copy else _host_buffer(t) for name, t in tensors.items()}
    devices = set()
    for name, tensor in tensors.items():
        if moved[name] is not tensor:
            moved[name].copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return moved


def _host_buffer(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        # Pinned memory is several times faster to copy to, and torch reuses it at the next save. Where the system
        # refuses to pin that much, plain memory does.
        with suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _is_hole(item: WriteItem) -> bool:
    """A rank that holds no row of a tensor has nothing to write; only an empty tensor is written as empty."""
    data = cast(Any, item.tensor_data)
    return math.prod(data.chunk.sizes) == 0 and math.prod(data.size) != 0


def _check_whole(item: WriteItem, local: Tensor) -> None:
    planned = cast(Any, item.tensor_data).chunk.sizes
    if planned != local.shape:
        raise ValueError(f"{item.index.fqn!r} should hold {list(planned)} on this rank and holds {list(local.shape)}")
