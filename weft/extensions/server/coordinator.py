"""What the coordinators of a run have in common: workers, their assignments, and the end of the run."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from weft.extensions.server.connections import Peer
from weft.extensions.server.run_records import RunRecords, StateCopy
from weft.extensions.server.server_shard import Shard
from weft.job.schema import Job
from weft.wire.tensors import Answer


class Assignment(Protocol):
    """A task that a worker computes."""

    @property
    def peer(self) -> Peer: ...

    @property
    def since(self) -> float: ...


A = TypeVar("A", bound=Assignment)


class RunCoordinator(ABC, Generic[A]):
    """Assigns tasks to workers and makes updates from their results. Methods are called from several threads."""

    def __init__(self, job: Job, shard: Shard, records: RunRecords):
        self.job, self.shard, self.records, self.sync = job, shard, records, job.train.sync
        self.changed = threading.Condition()
        self.workers: set[Peer] = set()
        self.assigned: dict[str, A] = {}
        self.issued = self.tokens = 0
        self.offset = 0
        """Samples read by earlier steps with another batch size, minus what steps of this size would have read."""
        self.bytes = 0
        """Traffic of all workers, as they report it."""
        self.ready = self.stop = False
        self.failed: str | None = None

    @property
    @abstractmethod
    def step(self) -> int:
        """Completed steps."""

    @property
    def ended(self) -> bool:
        return self.stop or self.failed is not None or self.step >= self.job.train.steps

    def finished(self) -> bool:
        """Whether no more updates are made and no copy is queued. Updates queue their copy under the same lock."""
        with self.changed:
            return self.ended and self.records.copies.empty()

    def complete(self) -> bool:
        """Whether every server is connected."""
        return True

    def stop_updates(self) -> None:
        """Make no more updates; workers are stopped when they ask for the next task."""
        with self.changed:
            self.stop = True
            self.changed.notify_all()

    def joined(self, peer: Peer) -> None:
        with self.changed:
            if peer.role == "worker":
                self.workers.add(peer)
                self.records.event("worker_joined", worker=peer.name, step=self.step)
                self.changed.notify_all()

    @abstractmethod
    def left(self, peer: Peer) -> None: ...

    def _take_back(self, peer: Peer) -> list[A]:
        """The assignments of a worker that is lost."""
        keys = [key for key, out in self.assigned.items() if out.peer is peer]
        return [self.assigned.pop(key) for key in keys]

    def _take_result(self, peer: Peer, head: dict[str, Any]) -> A | None:
        """The assignment that a worker has completed; None if it is no longer its own."""
        out = self.assigned.get(head["key"])
        if out is None or out.peer is not peer or not self.ready:
            return None
        self.bytes += int(head.get("bytes", 0))
        return self.assigned.pop(head["key"])

    def tick(self) -> None:
        """Called periodically: disconnect workers that exceed comm.timeout_s."""
        with self.changed:
            late = time.monotonic() - self.job.comm.timeout_s
            slow = [out.peer for out in self.assigned.values() if out.since < late]
        for peer in slow:
            peer.link.close()

    @abstractmethod
    def handle(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> Answer: ...

    @abstractmethod
    def begin(self, tensors: dict[str, Tensor], sync: dict[str, Any]) -> None:
        """Start from a checkpoint's tensors, or from the initial weights if there are none."""

    @abstractmethod
    def resume(self) -> bool:
        """Restore the newest snapshot; returns whether there is one."""

    @abstractmethod
    def copy(self, evaluates: bool, saves: bool) -> StateCopy:
        """The run's current state. The caller holds the lock, or no more updates are made."""
