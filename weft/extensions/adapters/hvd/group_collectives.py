"""The collectives over the ranks of a process set, by torch.distributed, on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.extensions.adapters.hvd.reduce_ops import TORCH_OPS, Adasum, Average, ReduceOp, adasum, scaled

WIDER = {torch.int16: torch.int32, torch.bool: torch.int32, torch.bfloat16: torch.float32}
"""Dtypes that Gloo does not reduce, and in which it reduces them."""


@dataclass(frozen=True)
class Members:
    """The ranks of a process set with their group, which a set of one rank does not need."""

    ranks: tuple[int, ...]
    rank: int
    """This rank's position among them."""
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def over_gloo(self) -> bool:
        return self.group is not None and dist.get_backend(self.group) != "nccl"


def allreduce(tensors: Sequence[Tensor], op: ReduceOp, scale: Sequence[float], members: Members) -> list[Tensor]:
    """Reduce tensors as one message for each dtype. `scale` has the factors before and after."""
    sums: list[Tensor] = [tensors[0]] * len(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        flat = scaled(torch.cat([tensors[i].detach().reshape(-1) for i in places]), scale[0])
        sizes = [tensors[i].numel() for i in places]
        if op == Adasum:
            parts = list(_adasum(flat, sizes, members))
        else:
            divisor = members.size if op == Average else 1
            parts = list(scaled(_reduced(flat, op, members), scale[1], divisor).split(sizes))
        for i, part in zip(places, parts, strict=True):
            sums[i] = part.view(tensors[i].shape)
    return sums


def _reduced(flat: Tensor, op: ReduceOp, members: Members) -> Tensor:
    if members.group is None or not flat.numel():
        return flat
    message = flat.to(WIDER[flat.dtype]) if members.over_gloo and flat.dtype in WIDER else flat
    message = _on_host(message, members)
    dist.all_reduce(message, TORCH_OPS[op], group=members.group)
    return message.to(flat.device, flat.dtype)


def _adasum(flat: Tensor, sizes: list[int], members: Members) -> Sequence[Tensor]:
    """Pairs of ranks combine their tensors, then pairs of pairs: every rank needs log2(ranks) exchanges."""
    distance = 1
    while distance < members.size:
        partner = members.rank ^ distance
        theirs = _swapped(flat, members.ranks[partner], members)
        pair = (flat, theirs) if members.rank < partner else (theirs, flat)
        both = zip(*(part.split(sizes) for part in pair), strict=True)
        flat = torch.cat([adasum(one, other) for one, other in both])
        distance *= 2
    return flat.split(sizes)


def _swapped(flat: Tensor, peer: int, members: Members) -> Tensor:
    message = _on_host(flat, members)
    received = torch.empty_like(message)
    exchange = [dist.P2POp(dist.isend, message, peer, members.group), dist.P2POp(dist.irecv, received, peer,
                members.group)]  # fmt: skip
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return received.to(flat.device)


def allgather(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], members: Members) -> list[Tensor]:
    """The rows of all ranks. `rows` has each rank's number of rows of each tensor."""
    return [_gathered(t, [each[i] for each in rows], members) for i, t in enumerate(tensors)]


def _gathered(tensor: Tensor, rows: list[int], members: Members) -> Tensor:
    if members.group is None:
        return tensor.detach().clone()
    most, shape = max(rows), tensor.shape[1:]
    padded = _message(tensor, members)
    if len(padded) < most:
        padded = torch.cat([padded, padded.new_zeros(most - len(padded), *padded.shape[1:])])
    parts = [torch.empty_like(padded) for _ in rows]
    if padded.numel():
        dist.all_gather(parts, padded, group=members.group)
    whole = torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
    return _tensor(whole, tensor, (sum(rows), *shape))


def broadcast(tensors: Sequence[Tensor], root: int, members: Members) -> list[Tensor]:
    """The tensors of the rank `root`, a number among all ranks."""
    received = []
    for tensor in tensors:
        message = _message(tensor.detach().reshape(1, -1).clone(), members)
        if members.group is not None and message.numel():
            dist.broadcast(message, root, group=members.group)
        received.append(_tensor(message, tensor, tensor.shape))
    return received


def alltoall(tensor: Tensor, splits: Sequence[Sequence[int]], members: Members) -> Tensor:
    """The rows that each rank sends to this one. `splits` has the numbers of rows from each rank to each."""
    sent, received = list(splits[members.rank]), [each[members.rank] for each in splits]
    if members.group is None:
        return tensor.detach()[: sent[0]].clone()
    message = _message(tensor[: sum(sent)], members)
    out = message.new_empty(sum(received), *message.shape[1:])
    if message.shape[1] and any(map(any, splits)):
        dist.all_to_all_single(out, message, received, sent, group=members.group)
    return _tensor(out, tensor, (sum(received), *tensor.shape[1:]))


def reducescatter(tensor: Tensor, op: ReduceOp, scale: Sequence[float], members: Members) -> Tensor:
    """This rank's rows of the sum or mean. The first ranks have one row more if they do not divide evenly."""
    value = scaled(tensor.detach(), scale[0])
    counts = split_rows(len(value), members.size)
    begin = sum(counts[: members.rank])
    mine = slice(begin, begin + counts[members.rank])
    if members.group is None or members.over_gloo:  # Gloo's reduce-scatter is an all-reduce
        rows = _reduced(value.contiguous().clone(), op, members)[mine]
    else:
        padded = torch.zeros((members.size, counts[0], *value.shape[1:]), dtype=value.dtype, device=value.device)
        for part, source in zip(padded, value.split(counts), strict=True):
            part[: len(source)] = source
        rows = torch.empty_like(padded[0])
        if rows.numel():
            dist.reduce_scatter_tensor(rows, padded.flatten(0, 1), TORCH_OPS[op], group=members.group)
        rows = rows[: counts[members.rank]]
    return scaled(rows, scale[1], members.size if op == Average else 1).clone()


def split_rows(rows: int, size: int) -> list[int]:
    """How many rows each rank gets."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]


def _on_host(message: Tensor, members: Members) -> Tensor:
    """Gloo's messages are in host memory."""
    return message.cpu() if members.over_gloo else message


def _message(tensor: Tensor, members: Members) -> Tensor:
    """A tensor as rows of bytes, which every backend can move whatever the dtype."""
    value = tensor.detach().contiguous()
    width = value.shape[1:].numel() * value.element_size()
    if not value.numel():
        return torch.empty(len(value), width, dtype=torch.uint8)
    return _on_host(value.reshape(-1).view(torch.uint8).view(len(value), width), members)


def _tensor(message: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """The opposite of _message."""
    if not message.numel():
        return like.new_empty(tuple(shape))
    return message.to(like.device).contiguous().view(like.dtype).view(tuple(shape))
