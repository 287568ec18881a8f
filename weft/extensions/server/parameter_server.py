"""Coordinator of a parameter server: assigns shares of each batch to workers, makes updates from their gradients."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.extensions.server.connections import Peer
from weft.extensions.server.coordinator import RunCoordinator
from weft.extensions.server.run_records import RunRecords, StateCopy
from weft.extensions.server.server_group import ServerGroup
from weft.extensions.server.server_shard import Shard, ShardHandle
from weft.job.schema import Job
from weft.optim.schedule import learning_rate
from weft.training.metrics import peak_memory_gib
from weft.wire.channel import WireError
from weft.wire.tensors import Answer

EPS = 1e-6


@dataclass(frozen=True)
class ShareAssignment:
    """A share of a batch that a worker computes."""

    number: int
    peer: Peer
    version: int
    """Version of the weights it uses."""
    since: float


@dataclass(frozen=True)
class StagedGradient:
    """A gradient that every server has received."""

    key: str
    number: int
    version: int
    loss: float
    count: int


class ParameterServer(RunCoordinator[ShareAssignment]):
    """Share n is the (n mod shares)-th of step n / shares. The share of a lost worker is assigned to another.

    sync: the shares of one step are assigned together, and their sum makes the update. async: shares are assigned as
    workers ask, and `gather` gradients make an update; an update waits if it would leave a gradient more than
    `staleness` updates old.
    """

    def __init__(self, job: Job, shares: int, shard: Shard, records: RunRecords, connect: Callable[[str], ShardHandle]):
        """`shares` is the number of shares in a step; `connect` opens the shard at an address."""
        super().__init__(job, shard, records)
        self.shares = shares
        self.asynchronous = self.sync.order == "async"
        self.gather = (self.sync.gather or shares) if self.asynchronous else shares
        self.servers = ServerGroup(shard, self.sync.servers, connect)
        self.waiting: set[Peer] = set()
        self.todo: deque[int] = deque()
        """Shares to compute again, before new ones."""
        self.staged: list[StagedGradient] = []
        self.next = self.consumed = self.version = self.incarnation = 0
        self.sums = [0.0, 0, 0, 0]
        """Sums over the current step: loss, count, staleness, gradients. `ready`: all servers hold the same version."""

    @property
    def step(self) -> int:
        return self.consumed // self.shares

    @property
    def total(self) -> int:
        return self.job.train.steps * self.shares

    # peers

    def joined(self, peer: Peer) -> None:
        super().joined(peer)
        with self.changed:
            if peer.role == "server":
                self.servers.join(peer)
                self.ready = False
            self.changed.notify_all()

    def left(self, peer: Peer) -> None:
        with self.changed:
            self.workers.discard(peer)
            self.waiting.discard(peer)
            if self.ended:
                return
            if peer.role == "server":
                if (index := self.servers.leave(peer)) is not None:
                    self._server_lost(index)
            else:
                lost = self._take_back(peer)
                self.todo.extend(out.number for out in lost)
                note = f"{peer.name} disconnected" + ("; its share is assigned to another worker" if lost else "")
                self.records.event("worker_lost", f"step {self.step}: {note}", worker=peer.name, step=self.step,
                                shares=len(lost))  # fmt: skip
                self._update_if_due()
            self.changed.notify_all()

    def _server_lost(self, index: int) -> None:
        self.ready = False
        self.records.event(
            "server_lost", f"step {self.step}: server {index} disconnected", server=index, step=self.step
        )

    def tick(self) -> None:
        """Called periodically: reconnect servers, and disconnect workers that exceed comm.timeout_s."""
        with self.changed:
            self.servers.reconnect()
            if not self.ready and not self.ended and self.servers.complete:
                self._restore()  # if it fails, the next tick tries again
        super().tick()

    def complete(self) -> bool:
        with self.changed:
            return self.servers.complete

    # state

    def begin(self, tensors: dict[str, Tensor], sync: dict[str, Any]) -> None:
        """A checkpoint of a run with another train.sync only gives the step."""
        if sync.get("mode") != "server" or sync["shares"] != self.shares:
            done = sync["step"] * self.shares
            sync = {**sync, "version": 0, "consumed": done, "next": done, "pending": []}
        with self.changed:
            self._adopt(sync)
            for holder in self.servers.all():
                holder.load(tensors, self.version)
            self.servers.snapshot(self.meta())
            self.ready = True
            self.changed.notify_all()

    def resume(self) -> bool:
        with self.changed:
            return self._restore()

    def _restore(self) -> bool:
        meta, before = self.servers.restore(), self.step
        if meta is None:
            return False
        self._adopt(meta)
        self.ready = True
        self.changed.notify_all()
        self.records.event("server_restored", f"step {self.step}: the servers resume from a snapshot", step=self.step,
                        version=self.version, steps_lost=max(0, before - self.step))  # fmt: skip
        return True

    def meta(self) -> dict[str, Any]:
        """State of the run besides its tensors."""
        pending = sorted({*self.todo, *(o.number for o in self.assigned.values()), *(c.number for c in self.staged)})
        return {
            "mode": "server", "version": self.version, "consumed": self.consumed, "next": self.next,
            "pending": pending, "tokens": self.tokens, "shares": self.shares, "offset": self.offset,
        }  # fmt: skip

    def _adopt(self, meta: dict[str, Any]) -> None:
        self.incarnation += 1  # the same version number may now mean different weights
        self.version, self.consumed = meta["version"], meta["consumed"]
        self.next, self.tokens, self.offset = meta["next"], meta["tokens"], meta["offset"]
        self.todo = deque(meta["pending"])
        self.assigned, self.staged, self.sums = {}, [], [0.0, 0, 0, 0]

    # requests

    def handle(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        match head["do"]:
            case "next":
                return self._next(peer), {}
            case "done":
                return self._done(peer, head), {}
            case "back":  # the worker could not push its gradients
                with self.changed:
                    if (out := self.assigned.pop(head["key"], None)) is not None:
                        self.todo.append(out.number)
                        self.changed.notify_all()
                return {}, {}
            case "stage" | "read":
                return self.shard.handle(head, tensors)
        raise ValueError(f"a {peer.role} may not request {head['do']!r}")

    def _next(self, peer: Peer) -> dict[str, Any]:
        with self.changed:
            self.waiting.add(peer)
            self.changed.wait_for(lambda: self.ended or peer not in self.waiting or self._may_assign())
            if self.ended or peer not in self.waiting:
                return {"stop": True}
            self.waiting.discard(peer)
            number = self.todo.popleft() if self.todo else self.next
            self.next = max(self.next, number + 1)
            self.issued += 1
            key = f"{number}.{self.issued}"
            self.assigned[key] = ShareAssignment(number, peer, self.version, time.monotonic())
            step, share = divmod(number, self.shares)
            return {
                "key": key, "step": step, "share": share, "offset": self.offset, "servers": self.servers.addresses,
                "version": f"{self.incarnation}.{self.version}",
            }  # fmt: skip

    def _may_assign(self) -> bool:
        if not self.ready or self._blocked():
            return False
        number = self.todo[0] if self.todo else self.next
        return number < self.total and (self.asynchronous or number // self.shares == self.step)

    def _blocked(self) -> bool:
        """Whether a due update waits because a worker's gradient would become too old."""
        oldest = min((o.version for o in self.assigned.values()), default=self.version + 1)
        return len(self.staged) >= self.gather and self.version + 1 - oldest > self.sync.staleness

    def _done(self, peer: Peer, head: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            if (out := self._take_result(peer, head)) is None:
                return {"taken": False}
            self.staged.append(
                StagedGradient(head["key"], out.number, out.version, float(head["loss"]), int(head["count"]))
            )
            self._update_if_due()
            self.changed.notify_all()
            return {"taken": True}

    def _update_if_due(self) -> None:
        left = self.consumed + len(self.staged) >= self.total  # no more gradients will come
        if not self.staged or not self.ready or self.ended or (len(self.staged) < self.gather and not left):
            return
        if self.asynchronous and self._blocked():
            return
        if not self.asynchronous:
            self.staged.sort(key=lambda c: c.number)  # a fixed order of summation
        taken, self.staged = self.staged, []
        try:
            self._update(taken)
        except WireError as error:
            self.records.log.debug("an update failed: %s", error)
            self.ready = False  # the servers may hold different versions now: restore a snapshot
            for index in self.servers.drop_unresponsive():
                self._server_lost(index)

    def _update(self, taken: list[StagedGradient]) -> None:
        before, job = self.step, self.job
        keys, keep = [c.key for c in taken], list(self.assigned)
        square = sum(holder.sum_staged(keys, keep) for holder in self.servers.all())
        count = max(1, sum(c.count for c in taken))
        norm = math.sqrt(square) / count
        loss = sum(c.loss for c in taken)
        if not self.records.finite(loss, norm):
            self.failed = (
                f"the {'loss' if not math.isfinite(loss) else 'gradient norm'} is not finite at step {before + 1}"
            )
            return
        clip = min(1.0, job.optim.clip / (norm + EPS)) if job.optim.clip else 1.0
        lr = learning_rate(job, min(before + 1, job.train.steps))
        for holder in self.servers.all():
            holder.apply(lr, clip / count, self.version + 1)
        step = (self.consumed + len(taken)) // self.shares
        evaluates, saves = self.records.due_at(before, step)
        # read before the update counts: a server that is lost here must not leave a run that ended without its state
        held = self.servers.read("all" if saves else "weights") if evaluates or saves else None
        stale = sum(self.version - c.version for c in taken)
        self.sums = [a + b for a, b in zip(self.sums, (loss, count, stale, len(taken)), strict=True)]
        self.version += 1
        self.consumed += len(taken)
        self.tokens += sum(c.count for c in taken)
        if self.step > before:
            self._close_step(before, norm, lr)
        if held is not None:
            self.records.copies.put(StateCopy(self.step, self.tokens, held, evaluates, saves, self.meta()))
        if self.version % self.sync.snapshot_every == 0:
            self.servers.snapshot(self.meta())

    def _close_step(self, before: int, norm: float, lr: float) -> None:
        loss, count, stale, number = self.sums
        self.sums, taken = [0.0, 0, 0, 0], self.step - before
        self.records.step(
            self.step, loss / max(1, count), round(count / taken), norm, lr, self.tokens, self.records.lap(taken),
            self.bytes,
            peak_memory_gib=peak_memory_gib(torch.device("cpu")), staleness=stale / max(1, number),
            workers=len(self.workers),
        )  # fmt: skip

    def copy(self, evaluates: bool, saves: bool) -> StateCopy:
        held = self.servers.read("all" if saves else "weights")
        return StateCopy(self.step, self.tokens, held, evaluates, saves, self.meta())
