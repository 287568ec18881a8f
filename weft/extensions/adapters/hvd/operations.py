"""Collectives on tensors, in Horovod's three forms: started and waited for later, in place, and as functions that
gradients pass (differentiable.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.extensions.adapters.hvd.engine import Handle
from weft.extensions.adapters.hvd.process_sets import ProcessSet, global_process_set, start_in
from weft.extensions.adapters.hvd.reduce_ops import Adasum, Average, ReduceOp, chosen_op
from weft.extensions.adapters.hvd.session import joined, size

Tensors = Sequence[Tensor]


def _new(outputs: list[Tensor], answer: Any) -> list[Tensor]:
    return outputs


def _first(outputs: list[Tensor], answer: Any) -> Tensor:
    return outputs[0]


def _into(tensors: Tensors) -> Callable[[list[Tensor], Any], list[Tensor]]:
    """Copies the outputs into tensors."""

    def copy(outputs: list[Tensor], answer: Any) -> list[Tensor]:
        with torch.no_grad():
            for tensor, output in zip(tensors, outputs, strict=True):
                tensor.copy_(output)
        return list(tensors)

    return copy


def synchronize(handle: Handle | Callable[[], Any]) -> Any:
    """Wait for a collective that was started, and return its result."""
    return handle.wait() if isinstance(handle, Handle) else handle()


def poll(handle: Handle) -> bool:
    """Whether a collective that was started is complete."""
    return handle.is_done()


def _start_allreduce(
    tensors: Tensors, average: bool | None, name: str | None, op: int | None, prescale: float, postscale: float,
    process_set: ProcessSet, finish: Callable[[list[Tensor], Any], Any],
) -> Handle:  # fmt: skip
    chosen, invalid = chosen_op(average, op), None
    if not tensors:
        invalid = "the list of tensors is empty"
    elif any(t.is_sparse for t in tensors):
        invalid = "a tensor is sparse; hvd.sparse_allreduce_async would work"
    if chosen == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("op=hvd.Adasum combines all ranks; leave process_set out")
        if size() & (size() - 1):
            raise NotImplementedError(f"op=hvd.Adasum needs a power of 2 of ranks, not {size()}")
        if not all(t.is_floating_point() for t in tensors):
            invalid = "op=hvd.Adasum needs floating-point tensors"
    return start_in(
        process_set, "allreduce", name, tensors, op=int(chosen), scale=[float(prescale), float(postscale)],
        finish=finish, invalid=invalid,
    )  # fmt: skip


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start the mean, sum, minimum, maximum, product or adaptive sum of the ranks' tensors."""
    return _start_allreduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set, _first)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start an allreduce in place."""
    finish = _into([tensor])
    return _start_allreduce(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set,
        lambda outputs, answer: finish(outputs, answer)[0],
    )  # fmt: skip


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """allreduce in place."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start an allreduce of several tensors as one message."""
    return _start_allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set, _new)


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start an allreduce of several tensors as one message, in place."""
    finish = _into(tensors)
    return _start_allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set, finish)


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """An allreduce of several tensors as one message, in place."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum or mean of sparse tensors, by gathering their elements. Call the result to wait for it."""
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices" if name else None, process_set)
    values = allgather_async(tensor._values(), f"{name}.values" if name else None, process_set)

    def finish() -> Tensor:
        places, elements = synchronize(indices), synchronize(values)
        if op == Average:
            elements = elements / process_set.size()
        return torch.sparse_coo_tensor(places.t(), elements, tensor.shape)

    return finish


def _rows_only(tensors: Tensors, what: str) -> str | None:
    """Why tensors have no rows, or None."""
    return f"{what} needs tensors with rows, not a scalar" if any(t.dim() == 0 for t in tensors) else None


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start to gather the rows of all ranks, which may have different numbers of them."""
    invalid = _rows_only([tensor], "allgather")
    return start_in(process_set, "allgather", name, [tensor], finish=_first, invalid=invalid)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to gather the rows of several tensors."""
    invalid = _rows_only(tensors, "allgather") if tensors else "the list of tensors is empty"
    return start_in(process_set, "allgather", name, tensors, finish=_new, invalid=invalid)


def _start_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet,
    finish: Callable[[list[Tensor], Any], Any],
) -> Handle:  # fmt: skip
    invalid = None
    if process_set.ranks and root_rank not in process_set.ranks:
        invalid = f"root_rank={root_rank} is not one of the ranks {process_set.ranks}"
    return start_in(process_set, "broadcast", name, [tensor], root=root_rank, finish=finish, invalid=invalid)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to send the tensor of a rank, whose number is that among all ranks."""
    return _start_broadcast(tensor, root_rank, name, process_set, _first)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to overwrite a tensor by that of a rank."""
    finish = _into([tensor])
    return _start_broadcast(tensor, root_rank, name, process_set, lambda outputs, answer: finish(outputs, answer)[0])


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite a tensor by that of a rank."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start to send rows to every rank, as many as `splits` says or equally many.

    The result is the received rows and how many came from each rank.
    """
    ranks = process_set.size() or 1
    invalid = _rows_only([tensor], "alltoall")
    counts = [len(tensor) // ranks] * ranks if invalid is None else []
    if splits is None and invalid is None and len(tensor) % ranks:
        invalid = f"alltoall without splits needs rows that {ranks} ranks divide, not {len(tensor)}"
    elif splits is not None and invalid is None:
        table = splits if isinstance(splits, Tensor) else torch.tensor(splits, dtype=torch.int32)
        counts = table.flatten().tolist()
        if table.is_floating_point() or table.dtype == torch.bool:
            invalid = f"alltoall needs splits of whole numbers, not {table.dtype}"
        elif len(counts) != ranks or min(counts) < 0:
            invalid = f"alltoall needs a split of 0 or more rows for each of {ranks} ranks, not {counts}"
        elif sum(counts) > len(tensor):
            invalid = f"alltoall: the splits {counts} are more than the {len(tensor)} rows of the tensor"
    place, like = process_set.rank(), splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)

    def finish(outputs: list[Tensor], answer: Any) -> tuple[Tensor, Tensor]:
        received = [each[place] for each in answer["splits"]]
        return outputs[0], torch.tensor(received, dtype=like.dtype, device=like.device)

    return start_in(process_set, "alltoall", name, [tensor], splits=counts, finish=finish, invalid=invalid)


def _start_reducescatter(
    tensors: Tensors, name: str | None, op: int, process_set: ProcessSet, prescale: float, postscale: float,
    finish: Callable[[list[Tensor], Any], Any],
) -> Handle:  # fmt: skip
    chosen = ReduceOp(op)
    invalid = _rows_only(tensors, "reducescatter") if tensors else "the list of tensors is empty"
    if chosen == Adasum:
        raise NotImplementedError("reducescatter has no op=hvd.Adasum; hvd.Sum or hvd.Average would work")
    return start_in(
        process_set, "reducescatter", name, tensors, op=int(chosen), scale=[float(prescale), float(postscale)],
        finish=finish, invalid=invalid,
    )  # fmt: skip


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:  # fmt: skip
    """Start a reduction of which each rank gets its rows; the first ranks get one more if they do not divide evenly."""
    return _start_reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor, _first)


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:  # fmt: skip
    """Start reductions of several tensors, of which each rank gets its rows."""
    return _start_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, _new)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set are here."""
    start_in(process_set, "barrier", None).wait()


def join(device: int = -1) -> int:
    """Say that this rank has no more data; reductions of the other ranks count it as zeros. Returns who came last."""
    return joined().engine.join()
