"""An MPI communicator as a torch process group: CPU tensors of every dtype, all collectives and messages.

fp16 and bf16 are reduced in fp32, since MPI has neither; data that is only moved is sent as it is.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.extensions.mpi.mpi_work import CombinedWork, MpiWork, engine, mpi

REDUCED_AS: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8,
}  # fmt: skip
REDUCTION_TYPES: dict[torch.dtype, str] = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int8: "INT8_T", torch.uint8: "UINT8_T",
    torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T", torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}  # fmt: skip
NAME = "mpi4py"
"""The name of the backend in torch."""

MOVE_TYPES: dict[int, str] = {1: "BYTE", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
"""Types of data that is only moved, by element size: MPI counts elements in 31 bits."""

R: Any = dist.ReduceOp.RedOpType
OPS: dict[Any, str] = {
    R.SUM: "SUM", R.AVG: "SUM", R.PRODUCT: "PROD", R.MIN: "MIN", R.MAX: "MAX", R.BAND: "BAND", R.BOR: "BOR",
    R.BXOR: "BXOR",
}  # fmt: skip
BOOL_OPS = {"SUM": "MAX", "PROD": "MIN"}
"""Of bools a sum is any(), a product all()."""

Group: Any = dist.ProcessGroup
"""torch's stubs list C++ overloads, of which a Python group is called by the first only."""


def _buffer(tensor: Tensor) -> Any:
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _move_buffer(tensor: Tensor) -> list[Any]:
    """A contiguous tensor as MPI takes it to move."""
    return [_buffer(tensor), tensor.numel(), getattr(mpi(), MOVE_TYPES[tensor.element_size()])]


def _reduce_buffer(tensor: Tensor) -> list[Any]:
    """A contiguous tensor as MPI takes it to reduce."""
    return [_buffer(tensor), tensor.numel(), getattr(mpi(), REDUCTION_TYPES[tensor.dtype])]


def _split_buffer(flat: Tensor, counts: Sequence[int]) -> list[Any]:
    """A flat tensor of which the ranks get parts of these sizes, in order."""
    places = list(accumulate(counts, initial=0))[:-1]
    return [_buffer(flat), (list(counts), places), getattr(mpi(), MOVE_TYPES[flat.element_size()])]


class MpiGroup(Group):
    """A communicator as a process group."""

    def __init__(self, comm: Any, timeout: datetime.timedelta):
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.comm, self.limit_s, self.engine = comm, timeout.total_seconds(), engine()
        self.engine.groups += 1
        self.called, self.described = "", ""

    # torch keeps these in the backends of a group, and there are none here; C++ and Python use different names
    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self.called

    def setGroupName(self, name: str) -> None:
        self.called = name

    def getGroupDesc(self) -> str:
        return self.described

    def setGroupDesc(self, text: str) -> None:
        self.described = text

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def __repr__(self) -> str:
        return f"MpiGroup(rank {self.rank()} of {self.size()})"

    def shutdown(self) -> None:
        if self.comm:
            self.engine.groups -= 1
            with self.engine.lock:
                self.comm.Free()

    abort = shutdown

    def _start(
        self, what: str, begin: Callable[[], Sequence[Any]], held: object, results: list[Tensor],
        after: Callable[[], object] | None = None,
    ) -> MpiWork:  # fmt: skip
        return self.engine.start(f"{what} of {self.size()} ranks", begin, self.limit_s, held, after, results)

    # reductions

    def _reduction(self, dtype: torch.dtype, op: Any) -> tuple[Any, bool]:
        """MPI's operator, and whether the result is divided by the number of ranks."""
        kind = op.op if hasattr(op, "op") else op
        if kind not in OPS:
            raise ValueError(f"MPI cannot reduce by {kind}")
        name = OPS[kind]
        if dtype == torch.bool:
            name = BOOL_OPS.get(name, name)
        return getattr(mpi(), name), kind == R.AVG

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        by = R.SUM if opts is None else opts.reduceOp
        held = [_working(t) for t in tensors]

        def begin() -> list[Any]:
            return [
                self.comm.Iallreduce(mpi().IN_PLACE, _reduce_buffer(h), op=self._reduction(t.dtype, by)[0])
                for h, t in zip(held, tensors, strict=True)
            ]

        def after() -> None:
            for h, t in zip(held, tensors, strict=True):
                self._write_result(h, t, by)

        return self._start("all_reduce", begin, held, tensors, after)

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        (tensor,) = tensors
        held, root = _working(tensor), opts.rootRank
        operator, _ = self._reduction(tensor.dtype, opts.reduceOp)
        mine = self.rank() == root

        def begin() -> list[Any]:
            if mine:
                return [self.comm.Ireduce(mpi().IN_PLACE, _reduce_buffer(held), op=operator, root=root)]
            return [self.comm.Ireduce(_reduce_buffer(held), None, op=operator, root=root)]

        after = (lambda: self._write_result(held, tensor, opts.reduceOp)) if mine else None
        return self._start("reduce", begin, held, tensors, after)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> MpiWork:
        op = R.SUM if opts is None else opts.reduceOp
        return self._reduce_scatter(output, given, [output.numel()] * self.size(), op)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MpiWork:
        (output,), (shards,) = outputs, inputs
        op = R.SUM if opts is None else opts.reduceOp
        return self._reduce_scatter(output, _flat(shards), [p.numel() for p in shards], op)

    def _reduce_scatter(self, output: Tensor, given: Tensor, counts: list[int], op: Any) -> MpiWork:
        held = _working(given)
        into = torch.empty(output.shape, dtype=held.dtype)
        operator, _ = self._reduction(output.dtype, op)
        return self._start(
            "reduce_scatter",
            lambda: [self.comm.Ireduce_scatter(_reduce_buffer(held), _reduce_buffer(into), counts, op=operator)],
            (held, into),
            [output],
            lambda: self._write_result(into, output, op),
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return CombinedWork([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def _write_result(self, held: Tensor, tensor: Tensor, op: Any) -> None:
        """Write the sum or mean to the output."""
        if self._reduction(tensor.dtype, op)[1]:
            held.copy_(held / self.size())
        if held is not tensor:
            tensor.copy_(held)

    # data that is only moved

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        root = 0 if opts is None else opts.rootRank
        held = [t.contiguous() for t in tensors]
        return self._start(
            "broadcast", lambda: [self.comm.Ibcast(_move_buffer(h), root=root) for h in held], held, tensors,
            lambda: _copy_back(held, tensors),
        )  # fmt: skip

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> MpiWork:
        held, into = given.contiguous(), _contiguous_like(output)
        # each rank's part is as large as ours, and MPI reads the count of one part
        part = [_buffer(into), held.numel(), getattr(mpi(), MOVE_TYPES[into.element_size()])]
        return self._start(
            "all_gather", lambda: [self.comm.Iallgather(_move_buffer(held), part)], (held, into), [output],
            lambda: _copy_back([into], [output]),
        )  # fmt: skip

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return CombinedWork([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        (shards,), (given,) = outputs, inputs
        held, (into, counts) = given.contiguous(), _room_for(shards)
        return self._start(
            "all_gather",
            lambda: [self.comm.Iallgatherv(_move_buffer(held), _split_buffer(into, counts))],
            (held, into),
            shards,
            lambda: _split_into(into, shards),
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MpiWork:
        (given,), root = inputs, opts.rootRank
        held = given.contiguous()
        if self.rank() != root:
            return self._start(
                "gather", lambda: [self.comm.Igatherv(_move_buffer(held), None, root=root)], held, inputs
            )
        (shards,) = outputs
        into, counts = _room_for(shards)
        return self._start(
            "gather",
            lambda: [self.comm.Igatherv(_move_buffer(held), _split_buffer(into, counts), root=root)],
            (held, into),
            shards,
            lambda: _split_into(into, shards),
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        (output,), root = outputs, opts.rootRank
        into = _contiguous_like(output)
        held, given = None, None
        if self.rank() == root:
            (shards,) = inputs
            held = _flat(shards)
            given = _split_buffer(held, [p.numel() for p in shards])
        return self._start(
            "scatter", lambda: [self.comm.Iscatterv(given, _move_buffer(into), root=root)], (held, into), outputs,
            lambda: _copy_back([into], outputs),
        )  # fmt: skip

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: list[int] | None, input_splits: list[int] | None,
        opts: Any = None,
    ) -> MpiWork:  # fmt: skip
        held = given.contiguous()
        into = _contiguous_like(output)
        sent, got = self._counts(held, input_splits), self._counts(into, output_splits)
        return self._start(
            "all_to_all",
            lambda: [self.comm.Ialltoallv(_split_buffer(held, sent), _split_buffer(into, got))],
            (held, into),
            [output],
            lambda: _copy_back([into], [output]),
        )

    def _counts(self, tensor: Tensor, splits: list[int] | None) -> list[int]:
        """Elements for each rank, of splits along the first dim or of even ones."""
        if not splits:
            return [tensor.numel() // self.size()] * self.size()
        row = tensor[0].numel() if tensor.dim() and tensor.shape[0] else 0
        return [n * row for n in splits]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        held = _flat(inputs)
        sent, (into, got) = [t.numel() for t in inputs], _room_for(outputs)
        return self._start(
            "all_to_all",
            lambda: [self.comm.Ialltoallv(_split_buffer(held, sent), _split_buffer(into, got))],
            (held, into),
            outputs,
            lambda: _split_into(into, outputs),
        )

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._start("barrier", lambda: [self.comm.Ibarrier()], None, [])

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> MpiWork:
        held = [t.contiguous() for t in tensors]
        return self._start(
            "send", lambda: [self.comm.Isend(_move_buffer(h), dest=to, tag=tag) for h in held], held, tensors
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MpiWork:
        into = [_contiguous_like(t) for t in tensors]
        return self._start(
            "receive", lambda: [self.comm.Irecv(_move_buffer(i), source=source, tag=tag) for i in into], into, tensors,
            lambda: _copy_back(into, tensors),
        )  # fmt: skip

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        return self.recv(tensors, mpi().ANY_SOURCE, tag)

    allreduce_coalesced = allreduce
    # the names of torch up to 2.12
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _working(tensor: Tensor) -> Tensor:
    """The tensor that MPI reduces in place: the tensor itself, or a copy in another dtype."""
    return tensor.to(REDUCED_AS.get(tensor.dtype, tensor.dtype)).contiguous()


def _flat(shards: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in shards])


def _room_for(shards: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """A flat tensor for all of them, and their sizes."""
    counts = [p.numel() for p in shards]
    return torch.empty(sum(counts), dtype=shards[0].dtype), counts


def _contiguous_like(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, else an empty contiguous one."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _copy_back(held: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for h, w in zip(held, wanted, strict=True):
        if h is not w:
            w.copy_(h)


def _split_into(flat: Tensor, shards: Sequence[Tensor]) -> None:
    for part, shard in zip(flat.split([p.numel() for p in shards]), shards, strict=True):
        shard.copy_(part.view(shard.shape))
