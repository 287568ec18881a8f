"""Horovod's ranks and collectives over Weft's mesh of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from weft.comm.compression.codec_base import RoundingNoise
from weft.comm.compression.codecs import codecs_of
from weft.comm.compression.compressed_sum import sum_all
from weft.extensions.adapters.layout import join_ranks
from weft.extensions.adapters.training import create_state
from weft.hardware.rank_environment import rank_info
from weft.job.compression import parse_compression
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import Plan

Average, Sum, Min, Max = "average", "sum", "min", "max"
OPERATIONS = {Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX}


class HvdCompression:
    """What tensors are sent as: names of comm.compression."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"


@dataclass
class Joined:
    """The ranks of this process after init()."""

    plan: Plan
    mesh: Mesh


_joined: list[Joined] = []
"""The ranks that init() joined. Horovod's functions take no mesh, so it is kept here."""


def init(*args: Any, **options: Any) -> None:
    """Join the ranks that torchrun, Weft or MPI started."""
    if not _joined:
        _joined.append(Joined(*join_ranks(Job(precision="fp32"))))


def joined() -> Joined:
    """The ranks; an error before init()."""
    if not _joined:
        raise JobError("call hvd.init() first")
    return _joined[0]


def is_initialized() -> bool:
    return bool(_joined)


def shutdown() -> None:
    """Leave the ranks."""
    while _joined:
        _joined.pop().mesh.close()


def rank() -> int:
    return joined().mesh.rank


def size() -> int:
    return joined().mesh.world


def local_rank() -> int:
    joined()
    return rank_info().local_rank


def local_size() -> int:
    joined()
    return rank_info().local_world


def cross_rank() -> int:
    """The number of this rank's node."""
    return rank() // local_size()


def cross_size() -> int:
    """The number of nodes."""
    return -(-size() // local_size())


@dataclass
class Handle:
    """A collective that was started, and its result."""

    work: dist.Work | None
    result: Tensor
    divisor: float = 1.0
    into: Tensor | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
            if self.divisor != 1:
                self.result = (self.result / self.divisor).to(self.result.dtype)
            if self.into is not None:
                self.into.copy_(self.result)
        return self.result if self.into is None else self.into


def _operation(average: bool | None, op: str | None) -> str:
    if average is not None and op is not None:
        raise JobError("allreduce takes average or op, not both")
    chosen = op if op is not None else Sum if average is False else Average
    if chosen not in OPERATIONS:
        raise JobError(f"op={chosen!r} is not supported; use hvd.Average, hvd.Sum, hvd.Min or hvd.Max")
    return chosen


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: str = HvdCompression.none,
    op: str | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, **options: Any,
) -> Tensor:  # fmt: skip
    """The mean, sum, minimum or maximum over all ranks, as a new tensor."""
    chosen, ranks = _operation(average, op), joined()
    if compression not in ("none", None) and ranks.mesh.world > 1:
        found = _compressed_sum(tensor, compression, chosen) * prescale_factor
        divisor = size() if chosen == Average else 1
        return (found * postscale_factor / divisor).to(tensor.dtype)
    found = allreduce_async(tensor * prescale_factor if prescale_factor != 1 else tensor, op=chosen).wait()
    return found * postscale_factor if postscale_factor != 1 else found


def _compressed_sum(tensor: Tensor, compression: str, chosen: str) -> Tensor:
    if chosen not in (Average, Sum):
        raise JobError(f"compression={compression} works with hvd.Average and hvd.Sum, not with {chosen}")
    try:
        setting = parse_compression(str(compression))
    except ValueError as error:
        raise JobError(f"compression={compression!r} {error}") from None
    mesh = joined().mesh
    codec, axis = codecs_of(setting).gradients, mesh.everyone
    assert axis is not None
    if codec is None or setting.entry.share is not None or setting.entry.low_rank:
        raise JobError(
            f"compression={compression} needs DistributedOptimizer; here fp16, bf16, int8 or int4 would work"
        )
    flat = tensor.detach().float().flatten().clone()
    found, _ = sum_all(axis, codec, flat, RoundingNoise(mesh.rank, mesh.device))
    return found.view(tensor.shape)


def allreduce_async(tensor: Tensor, average: bool | None = None, name: str | None = None, op: str | None = None,
                    **options: Any) -> Handle:  # fmt: skip
    """Start an allreduce; synchronize() or wait() gives the result."""
    chosen, mesh = _operation(average, op), joined().mesh
    found = tensor.detach().clone()
    if mesh.world == 1:
        return Handle(None, found)
    work = dist.all_reduce(found, OPERATIONS[chosen], async_op=True)
    return Handle(work, found, mesh.world if chosen == Average else 1)


def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """allreduce in place."""
    with torch.no_grad():
        tensor.copy_(allreduce(tensor, *args, **options))
    return tensor


def allreduce_async_(tensor: Tensor, *args: Any, **options: Any) -> Handle:
    """Start an allreduce in place."""
    handle = allreduce_async(tensor, *args, **options)
    handle.into = tensor.detach()
    return handle


def grouped_allreduce(tensors: list[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    return [allreduce(tensor, *args, **options) for tensor in tensors]


def synchronize(handle: Handle) -> Tensor:
    """Wait for a collective that was started."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether a collective that was started is complete."""
    return handle.work is None or handle.work.is_completed()


def allgather(tensor: Tensor, name: str | None = None, **options: Any) -> Tensor:
    """The tensors of all ranks along the first dimension, in which they may differ."""
    mesh = joined().mesh
    if mesh.world == 1:
        return tensor.detach().clone()
    rows = mesh.all_gather_json(tensor.shape[0])
    padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor.detach()
    found = [torch.empty_like(padded) for _ in range(mesh.world)]
    dist.all_gather(found, padded)
    return torch.cat([part[:count] for part, count in zip(found, rows, strict=True)])


def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    """A JSON value from every rank."""
    found: list[Any] = joined().mesh.all_gather_json(value)
    return found


def broadcast(tensor: Tensor, root_rank: int = 0, name: str | None = None, **options: Any) -> Tensor:
    """The tensor of a rank, as a new tensor."""
    return broadcast_(tensor.detach().clone(), root_rank)


def broadcast_(tensor: Tensor, root_rank: int = 0, name: str | None = None, **options: Any) -> Tensor:
    """Overwrite a tensor by that of a rank."""
    if not 0 <= root_rank < size():
        raise JobError(f"root_rank={root_rank} is not a rank; there are {size()}")
    if size() > 1:
        value = tensor.detach()
        whole = value if value.is_contiguous() else value.contiguous()
        dist.broadcast(whole, src=root_rank)
        if whole is not value:
            value.copy_(whole)
    return tensor


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """A JSON value from a rank."""
    return allgather_object(value if rank() == root_rank else None)[root_rank]


def reducescatter(tensor: Tensor, op: str = Average, **options: Any) -> Tensor:
    """This rank's rows of the mean or sum over all ranks."""
    rows = tensor.shape[0]
    each, more = divmod(rows, size())
    begin = rank() * each + min(rank(), more)
    return allreduce(tensor, op=op)[begin : begin + each + (rank() < more)]


def alltoall(tensor: Tensor, splits: Tensor | None = None, **options: Any) -> Tensor:
    """Send rows to every rank, as many as `splits` has or equally many."""
    counts = splits.tolist() if splits is not None else [tensor.shape[0] // size()] * size()
    if sum(counts) != tensor.shape[0]:
        raise JobError(f"alltoall: splits {counts} do not add up to the {tensor.shape[0]} rows of the tensor")
    table = joined().mesh.all_gather_json(counts)
    whole, parts, begin = allgather(tensor), [], 0
    for row in table:
        start = begin + sum(row[: rank()])
        parts.append(whole[start : start + row[rank()]])
        begin += sum(row)
    return torch.cat(parts)


def barrier(*args: Any) -> None:
    joined().mesh.barrier()


def join(*args: Any) -> int:
    """Refused: in Weft every rank has as many batches."""
    raise JobError("hvd.join() is not supported; give every rank as many batches, as a sampler with drop_last does")


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """Overwrite parameters or a state dict by those of a rank."""
    items = params.items() if isinstance(params, Mapping) else params
    with torch.no_grad():
        for _, tensor in sorted((name, value) for name, value in items if isinstance(value, Tensor)):
            broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Overwrite the state and the settings of an optimizer by those of a rank."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if any(broadcast_object(bool(inner.state), r) for r in range(size())) and not inner.state:
        create_state(inner)
    groups = [{k: v for k, v in g.items() if isinstance(v, int | float | bool | str)} for g in inner.param_groups]
    for group, values in zip(inner.param_groups, broadcast_object(groups, root_rank), strict=True):
        group.update(values)
    for group in inner.param_groups:
        for param in group["params"]:
            for _, value in sorted((k, v) for k, v in inner.state.get(param, {}).items() if isinstance(v, Tensor)):
                broadcast_(value, root_rank)
