"""Rank 0's record of what every rank asks for: a collective begins when all its ranks have asked for it by its name.

So ranks may ask in different orders, a name that only some ranks use does not stop the others, and tensors that do not
fit together are an error on every rank instead of an abort.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from weft.extensions.adapters.hvd.reduce_ops import Average, ReduceOp, Sum

Message = dict[str, Any]

GLOBAL_SET = 0
"""The process set of all ranks."""


class CollectiveCoordinator:
    """Collects requests and sends answers, the same ones in the same order to every rank of a process set."""

    def __init__(self, world: int, send: Callable[[int, Message], None]):
        self._world, self._send = world, send
        self._sets = {GLOBAL_SET: tuple(range(world))}
        self._next_set = 1
        self._waiting: dict[tuple[int, str], dict[int, Message]] = {}
        """By process set and name, the requests by rank."""
        self._joined: list[int] = []
        """The ranks in join(), in the order of their calls."""
        self._left: dict[int, str] = {}
        """The ranks that are gone, and why."""
        self._lock = threading.Lock()

    def receive(self, rank: int, request: Message) -> None:
        """Take a rank's request, and answer all that are complete now."""
        with self._lock:
            if request["do"] == "join":
                self._joined.append(rank)
                self._answer_complete()
                if len(self._joined) == self._world:
                    self._send_to(self._sets[GLOBAL_SET], {"do": "join", "name": "join", "set": 0, "last": rank})
                    self._joined.clear()
                return
            key = (request["set"], request["name"])
            self._waiting.setdefault(key, {})[rank] = request
            if self._is_complete(key):
                self._answer(key)

    def leave(self, rank: int, why: str) -> None:
        """A rank is gone: what waits for it fails, now and later."""
        with self._lock:
            self._left[rank] = why
            self._answer_complete()

    def _is_complete(self, key: tuple[int, str]) -> bool:
        asked = self._waiting[key]
        return all(rank in asked or rank in self._joined or rank in self._left for rank in self._sets.get(key[0], ()))

    def _answer_complete(self) -> None:
        for key in [key for key in self._waiting if self._is_complete(key)]:
            self._answer(key)

    def _answer(self, key: tuple[int, str]) -> None:
        requests = self._waiting.pop(key)
        first = requests[min(requests)]
        ranks = self._sets.get(key[0], tuple(requests))
        answer: Message = {"do": first["do"], "name": key[1], "set": key[0]}
        if error := self._error(requests, ranks):
            self._send_to(ranks, {**answer, "error": error})
            return
        if first["do"] == "add_set":
            chosen = tuple(first["ranks"])
            if chosen in self._sets.values():
                self._send_to(ranks, {**answer, "error": f"a process set of the ranks {list(chosen)} exists already"})
                return
            answer |= {"ranks": first["ranks"], "id": self._next_set}
            self._sets[self._next_set] = chosen
            self._next_set += 1
        elif first["do"] == "remove_set":
            removed = first["id"]
            answer["id"] = removed if self._sets.pop(removed, None) is not None else None
            for other in [k for k in self._waiting if k[0] == removed]:
                del self._waiting[other]
        elif first["do"] == "alltoall":
            answer["splits"] = [requests[rank]["splits"] for rank in ranks]
        elif first["do"] == "allgather":
            answer["rows"] = [[shape[0] for shape in requests[rank]["shapes"]] for rank in ranks]
        elif first["do"] == "allreduce":
            names = ("op", "scale", "shapes", "dtypes", "device")  # a rank in join() has no tensors to read them from
            answer |= {name: first[name] for name in names}
        self._send_to(ranks, answer)

    def _send_to(self, ranks: tuple[int, ...], answer: Message) -> None:
        for rank in ranks:
            if rank not in self._left:
                self._send(rank, answer)

    def _error(self, requests: dict[int, Message], ranks: tuple[int, ...]) -> str | None:
        """Why these requests cannot be one collective, or None."""
        first_rank = min(requests)
        first = requests[first_rank]
        if first["set"] not in self._sets:
            return f"{first['name']}: the process set {first['set']} was removed"
        for rank in ranks:
            if rank in self._left and rank not in requests:
                return f"rank {rank} {self._left[rank]}"
        for rank, request in sorted(requests.items()):
            if "invalid" in request:
                return f"rank {rank}: {request['invalid']}"
        for rank, request in sorted(requests.items()):
            for name, text in SAME:
                if request.get(name) != first.get(name):
                    return (
                        f"{first['name']}: {text} differ: {first.get(name)} on rank {first_rank}, "
                        f"{request.get(name)} on rank {rank}"
                    )
            if (shapes := comparable(request)) != (expected := comparable(first)):
                return (
                    f"{first['name']}: shapes do not fit: {expected} on rank {first_rank}, {shapes} on rank {rank}"
                    f"{' after the first dimension' if first['do'] in ROWS_MAY_DIFFER else ''}"
                )
        joined = [rank for rank in ranks if rank in self._joined and rank not in requests]
        if joined and not (first["do"] == "allreduce" and first["op"] in (Sum, Average)):
            op = f" with op={ReduceOp(first['op']).name}" if first["do"] == "allreduce" else ""
            return (
                f"{first['name']}: rank {joined[0]} is in join(), where {first['do']}{op} cannot be; allreduce with "
                "hvd.Sum or hvd.Average would work"
            )
        return None


SAME = (
    ("do", "operations"), ("dtypes", "dtypes"), ("op", "values of op"), ("scale", "scale factors"),
    ("root", "root ranks"), ("ranks", "ranks of the process set"), ("id", "process sets"),
)  # fmt: skip
"""Fields that are the same in all requests of a collective, and what they are called."""

ROWS_MAY_DIFFER = ("allgather", "alltoall")


def comparable(request: Message) -> list[list[int]]:
    """The shapes of a request, without the number of rows where that may differ between ranks."""
    shapes: list[list[int]] = request.get("shapes", [])
    return [shape[1:] for shape in shapes] if request["do"] in ROWS_MAY_DIFFER else shapes
