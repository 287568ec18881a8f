"""Collectives that gradients pass, each with the gradient that Horovod defines for it.

Those of allgather and broadcast are means over the ranks, those of the others sums: a loss is that of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.extensions.adapters.hvd import operations
from weft.extensions.adapters.hvd.operations import Tensors, synchronize
from weft.extensions.adapters.hvd.process_sets import ProcessSet, global_process_set
from weft.extensions.adapters.hvd.reduce_ops import Average, ReduceOp, Sum, chosen_op, scaled
from weft.extensions.adapters.hvd.session import joined, rank
from weft.extensions.adapters.hvd.tensor_compressors import AnyCompression, HvdCompression, coded_sum, compressor_named


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.settings = settings
        return tuple(synchronize(operations.grouped_allreduce_async(tensors, **settings)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        settings = {**ctx.settings, "name": None}
        if settings["op"] not in (Sum, Average):
            op = ReduceOp(settings["op"]).name
            raise NotImplementedError(f"allreduce with op=hvd.{op} has no gradient; hvd.Sum or hvd.Average has one")
        return None, *synchronize(operations.grouped_allreduce_async(grads, **settings))


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None,
    compression: AnyCompression = HvdCompression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """An allreduce of several tensors as one message."""
    chosen, compressor = chosen_op(average, op), compressor_named(compression)
    if compressor is None:
        if chosen not in (Average, Sum) or process_set is not global_process_set:
            raise ValueError(f"compression={compression!r} takes op=hvd.Average or hvd.Sum over all ranks")
        mesh = joined().mesh
        sums = [coded_sum(scaled(t, prescale_factor), str(compression), mesh) for t in tensors]
        return [scaled(t, postscale_factor, mesh.world if chosen == Average else 1) for t in sums]
    settings = {
        "op": chosen, "name": name, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
        "process_set": process_set,
    }  # fmt: skip
    sent = [compressor.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(settings, *(tensor for tensor, _ in sent))
    return [compressor.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, sent, strict=True)]


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None,
    compression: AnyCompression = HvdCompression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """The mean, sum, minimum, maximum, product or adaptive sum of the ranks' tensors."""
    return grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )[0]  # fmt: skip


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.rows, ctx.process_set = [tensor.shape[:1] for tensor in tensors], process_set
        return tuple(synchronize(operations.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        means = grouped_allreduce(grads, op=Average, process_set=ctx.process_set)
        mine = torch.tensor([[rows[0] for rows in ctx.rows]])
        before = synchronize(operations.allgather_async(mine, process_set=ctx.process_set))[: ctx.process_set.rank()]
        starts = before.sum(0).tolist()
        return (
            None,
            None,
            *(mean.narrow(0, start, rows[0]) for mean, start, rows in zip(means, starts, ctx.rows, strict=True)),
        )


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """The rows of all ranks, for several tensors."""
    return list(_Allgather.apply(name, process_set, *tensors))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The rows of all ranks, which may have different numbers of them."""
    return grouped_allgather([tensor], name, process_set)[0]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(operations.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        return mean if rank() == ctx.root_rank else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of a rank, whose number is that among all ranks."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        rows, received = synchronize(operations.alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.rows = received, process_set, len(tensor)
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        returned, _ = alltoall(grads[0], ctx.received, process_set=ctx.process_set)
        unsent = returned.new_zeros(ctx.rows - len(returned), *returned.shape[1:])
        return torch.cat([returned, unsent]) if len(unsent) else returned, None, None, None


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows to every rank. With `splits`, the result is the received rows and how many came from each rank."""
    rows, received = _Alltoall.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.settings = settings
        return tuple(synchronize(operations.grouped_reducescatter_async(tensors, **settings)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        process_set, op = ctx.settings["process_set"], ctx.settings["op"]
        if op not in (Sum, Average):
            raise NotImplementedError(f"reducescatter with op=hvd.{ReduceOp(op).name} has no gradient; hvd.Sum has one")
        factor = ctx.settings["prescale_factor"] * ctx.settings["postscale_factor"]
        factor *= process_set.size() if op == Sum else 1
        return None, *grouped_allgather([scaled(grad, factor) for grad in grads], process_set=process_set)


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: AnyCompression = HvdCompression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """Reductions of several tensors, of which each rank gets its rows."""
    compressor = compressor_named(compression)
    if compressor is None:
        raise ValueError(f"reducescatter has no compression={compression!r}; hvd.Compression.fp16 or bf16 would work")
    settings = {
        "name": name, "op": op, "process_set": process_set, "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }  # fmt: skip
    sent = [compressor.compress(tensor) for tensor in tensors]
    reduced = _Reducescatter.apply(settings, *(tensor for tensor, _ in sent))
    return [compressor.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, sent, strict=True)]


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: AnyCompression = HvdCompression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """This rank's rows of the mean or sum of the ranks' tensors."""
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]  # fmt: skip
