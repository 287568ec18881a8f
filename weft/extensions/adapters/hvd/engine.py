"""A rank's collectives: requests to the coordinator, and a thread that runs what it answers, in its order."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.extensions.adapters.hvd import group_collectives
from weft.extensions.adapters.hvd.connection import connect_ranks
from weft.extensions.adapters.hvd.coordinator import GLOBAL_SET, Message
from weft.extensions.adapters.hvd.group_collectives import Members
from weft.extensions.adapters.hvd.reduce_ops import ReduceOp
from weft.mesh import Mesh
from weft.wire.channel import WireError


class HorovodInternalError(RuntimeError):
    """A collective failed: the ranks' tensors do not fit together, or a rank is gone."""


@dataclass
class Handle:
    """A collective that was started; synchronize() returns its result."""

    name: str
    process_set: int
    tensors: list[Tensor] = field(default_factory=list)
    finish: Callable[[list[Tensor], Message], Any] = lambda outputs, answer: None
    """Makes the caller's result of the outputs."""
    details: Message = field(default_factory=dict)
    """What the request says beside its tensors."""
    _done: threading.Event = field(default_factory=threading.Event)
    _outputs: list[Tensor] = field(default_factory=list)
    _answer: Message = field(default_factory=dict)
    _error: Exception | None = None
    _result: tuple[Any] | None = None
    ready: torch.cuda.Event | None = None
    """On GPUs: when the tensors are computed."""
    complete: torch.cuda.Event | None = None
    """On GPUs: when the outputs are."""

    def set_outputs(self, outputs: list[Tensor], answer: Message) -> None:
        self._outputs, self._answer = outputs, answer
        self._done.set()

    def set_error(self, error: Exception) -> None:
        self._error = error
        self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Any:
        """The result, once the collective is complete."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._result is None:
            if self.complete is not None:
                torch.cuda.current_stream().wait_event(self.complete)
                for tensor in self._outputs:
                    tensor.record_stream(torch.cuda.current_stream())
            self._result = (self.finish(self._outputs, self._answer),)
            self._outputs, self.tensors = [], []
        return self._result[0]


class CollectiveEngine:
    """The process sets and the collectives under way of one rank, from init() to shutdown()."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        ranks = tuple(range(mesh.world))
        self._members = {GLOBAL_SET: Members(ranks, mesh.rank, dist.new_group() if mesh.world > 1 else None)}
        self._pending: dict[tuple[int, str], Handle] = {}
        self._lock = threading.Lock()
        self._numbers: dict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
        self._broken: str | None = None
        self._stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._connection = connect_ranks(mesh)
        self._thread = threading.Thread(target=self._run, name="horovod", daemon=True)
        self._thread.start()

    def members(self, process_set: int) -> Members:
        return self._members[process_set]

    def start(
        self, do: str, name: str | None, tensors: Sequence[Tensor] = (), process_set: int = GLOBAL_SET,
        finish: Callable[[list[Tensor], Message], Any] = lambda outputs, answer: None, invalid: str | None = None,
        **details: Any,
    ) -> Handle:  # fmt: skip
        """Ask for a collective.

        `invalid` says why this rank's arguments are wrong: the other ranks then get an error instead of waiting.
        """
        if name is None:
            name = f"noname.{next(self._numbers[do, process_set])}"
        name = f"{do}.{name}"
        handle = Handle(name, process_set, list(tensors), finish, details)
        if self._stream is not None and any(t.is_cuda for t in tensors):
            handle.ready = torch.cuda.Event()
            handle.ready.record()
        request: Message = {
            "do": do,
            "name": name,
            "set": process_set,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "device": tensors[0].device.type if tensors else "cpu",
            **details,
        }
        if invalid is not None:
            request["invalid"] = invalid
        with self._lock:
            if self._broken is not None:
                raise HorovodInternalError(f"{name}: {self._broken}")
            if (process_set, name) in self._pending:
                raise ValueError(f"{name} is under way already; wait for it, or use another name")
            if invalid is None:
                self._pending[process_set, name] = handle
        try:
            self._connection.send(request)
        except WireError as error:
            self._fail(f"the connection to rank 0 is lost ({error})")
        if invalid is not None:
            raise ValueError(f"{name}: {invalid}")
        return handle

    def join(self) -> int:
        """Take part in the other ranks' reductions with zeros until all ranks are here. Returns who came last."""
        handle = Handle("join", GLOBAL_SET, finish=lambda outputs, answer: answer["last"])
        with self._lock:
            if self._broken is not None:
                raise HorovodInternalError(f"join: {self._broken}")
            self._pending[GLOBAL_SET, "join"] = handle
        try:
            self._connection.send({"do": "join"})
        except WireError as error:
            self._fail(f"the connection to rank 0 is lost ({error})")
        last: int = handle.wait()
        return last

    def close(self) -> None:
        """Leave the other ranks; what is under way fails."""
        self._fail("hvd.shutdown() was called")
        self._connection.close()
        self._thread.join()
        for members in self._members.values():
            if members.group is not None and dist.is_initialized():
                with contextlib.suppress(ValueError):  # it went with the default group
                    dist.destroy_process_group(members.group)

    def _fail(self, why: str) -> None:
        with self._lock:
            self._broken = self._broken or why
            handles = list(self._pending.values())
            self._pending.clear()
        for handle in handles:
            handle.set_error(HorovodInternalError(f"{handle.name}: {why}"))

    def _run(self) -> None:
        with torch.no_grad():  # each thread has its own gradient mode
            while True:
                try:
                    answer = self._connection.receive()
                except WireError as error:
                    self._fail(f"the connection to rank 0 is lost ({error})")
                    return
                if answer is None:
                    return
                self._execute(answer)

    def _execute(self, answer: Message) -> None:
        key = (answer["set"], answer["name"])
        handle = self._pending.get(key)
        error: Exception | None = None
        outputs: list[Tensor] = []
        try:
            if "error" in answer:
                error = HorovodInternalError(answer["error"])
            elif self._stream is None or handle is None or handle.ready is None:
                outputs = self._outputs(answer, handle)
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(handle.ready)
                    for tensor in handle.tensors:
                        tensor.record_stream(self._stream)
                    outputs = self._outputs(answer, handle)
                    handle.complete = torch.cuda.Event()
                    handle.complete.record()
        except RuntimeError as failure:  # a rank is gone
            error = HorovodInternalError(f"{answer['name']}: {failure}")
        with self._lock:
            self._pending.pop(key, None)
        if handle is not None and error is not None:
            handle.set_error(error)
        elif handle is not None:
            handle.set_outputs(outputs, answer)

    def _outputs(self, answer: Message, handle: Handle | None) -> list[Tensor]:
        do, tensors = answer["do"], handle.tensors if handle is not None else []
        if do == "add_set":
            self._add_members(answer["id"], tuple(answer["ranks"]))
        elif do == "remove_set":
            self._remove_members(answer["id"])
        elif do == "join":
            self._numbers.clear()  # ranks that joined early have started fewer collectives
        if do in ("add_set", "remove_set", "barrier", "join"):
            return []
        members = self._members[answer["set"]]
        if do == "allreduce":
            if handle is None:  # this rank is in join()
                device = self.mesh.device if answer["device"] == "cuda" else torch.device("cpu")
                kinds = zip(answer["shapes"], answer["dtypes"], strict=True)
                tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in kinds]
            return group_collectives.allreduce(tensors, ReduceOp(answer["op"]), answer["scale"], members)
        assert handle is not None
        if do == "allgather":
            return group_collectives.allgather(tensors, answer["rows"], members)
        details = handle.details
        if do == "broadcast":
            return group_collectives.broadcast(tensors, details["root"], members)
        if do == "alltoall":
            return [group_collectives.alltoall(tensors[0], answer["splits"], members)]
        op, scale = ReduceOp(details["op"]), details["scale"]
        return [group_collectives.reducescatter(tensor, op, scale, members) for tensor in tensors]

    def _add_members(self, number: int, ranks: tuple[int, ...]) -> None:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        mine = self.mesh.rank in ranks
        self._members[number] = Members(
            ranks, ranks.index(self.mesh.rank) if mine else -1, group if mine and group is not None else None
        )

    def _remove_members(self, number: int | None) -> None:
        members = self._members.pop(number, None) if number is not None else None
        if members is not None and members.group is not None:
            dist.destroy_process_group(members.group)
