"""The desk of a parameter server: shares of the samples go out, gradients come back, and enough make an update."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.job.schema import Job
from weft.optim.schedule import rate
from weft.server.connections import Peer
from weft.server.records import Book, Copy
from weft.server.servers import Servers
from weft.server.shard import Holder, Shard
from weft.training.metrics import peak_memory_gib
from weft.wire.channel import WireError
from weft.wire.tensors import Answer

EPS = 1e-6


@dataclass(frozen=True)
class Out:
    """A share of the samples that a worker computes."""

    number: int
    peer: Peer
    version: int
    """Of the weights it was told to use."""
    since: float


@dataclass(frozen=True)
class Come:
    """A gradient that lies staged on every server."""

    key: str
    number: int
    version: int
    loss: float
    count: int


class Updates:
    """Share n is the (n mod shares)-th of step n / shares. A share whose worker is lost goes to another.

    sync: the shares of one step go out together, and their sum makes the update. async: shares go out as workers ask,
    `gather` gradients make an update, and none is made that would leave a gradient more than `staleness` updates old.
    """

    def __init__(self, job: Job, shares: int, shard: Shard, book: Book, connect: Callable[[str], Holder]):
        """A step has so many shares; `connect` reaches the shard at an address."""
        self.job, self.shares, self.shard, self.book = job, shares, shard, book
        self.sync = job.train.sync
        self.asynchronous = self.sync.order == "async"
        self.gather = (self.sync.gather or shares) if self.asynchronous else shares
        self.changed = threading.Condition()
        self.servers = Servers(shard, self.sync.servers, connect)
        self.waiting: set[Peer] = set()
        self.workers: set[Peer] = set()
        self.todo: deque[int] = deque()
        """Shares to be computed again, before new ones."""
        self.out: dict[str, Out] = {}
        self.come: list[Come] = []
        self.next = self.consumed = self.version = self.tokens = 0
        self.issued = self.incarnation = 0
        self.offset = 0
        """Samples that earlier steps of other sizes read, beyond what steps of this size would have."""
        self.ready = False
        """All servers are here and hold one version."""
        self.stop = False
        self.failed: str | None = None
        self.sums = [0.0, 0, 0, 0]
        """Of the step under way: loss, count, staleness, gradients."""
        self.bytes = 0
        """That workers sent and received, by what they tell."""

    @property
    def step(self) -> int:
        return self.consumed // self.shares

    @property
    def total(self) -> int:
        return self.job.train.steps * self.shares

    @property
    def ended(self) -> bool:
        return self.stop or self.failed is not None or self.consumed >= self.total

    # who comes and goes

    def arrived(self, peer: Peer) -> None:
        with self.changed:
            if peer.role == "server":
                self.servers.join(peer)
                self.ready = False
            else:
                self.workers.add(peer)
                self.book.event("worker_joined", worker=peer.name, step=self.step)
            self.changed.notify_all()

    def gone(self, peer: Peer) -> None:
        with self.changed:
            self.workers.discard(peer)
            self.waiting.discard(peer)
            if self.ended:
                return
            if peer.role == "server":
                if (index := self.servers.leave(peer)) is not None:
                    self._lost(index)
            else:
                lost = [key for key, out in self.out.items() if out.peer is peer]
                for key in lost:
                    self.todo.append(self.out.pop(key).number)
                note = f"{peer.name} is gone" + (": its share goes to another" if lost else "")
                self.book.event("worker_lost", f"step {self.step}: {note}", worker=peer.name, step=self.step,
                                shares=len(lost))  # fmt: skip
                self._update_if_due()
            self.changed.notify_all()

    def _lost(self, index: int) -> None:
        self.ready = False
        self.book.event("server_lost", f"step {self.step}: server {index} is gone", server=index, step=self.step)

    def tick(self) -> None:
        """Now and then: bring a server back in, and give up on workers that take too long."""
        with self.changed:
            self.servers.call()
            if not self.ready and not self.ended and self.servers.whole:
                self._restore()  # or again at the next tick
            late = time.monotonic() - self.job.comm.timeout_s
            slow = [out.peer for out in self.out.values() if out.since < late]
        for peer in slow:
            peer.link.close()

    def whole(self) -> bool:
        """Whether every server is here."""
        with self.changed:
            return self.servers.whole

    def halt(self) -> None:
        """No more updates: workers hear it when they ask."""
        with self.changed:
            self.stop = True
            self.changed.notify_all()

    # from which state

    def begin(self, tensors: dict[str, Tensor], sync: dict[str, Any]) -> None:
        """All servers are here: go on from a checkpoint's tensors, or from the beginning without any. A checkpoint of
        another kind of run knows only the step."""
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
        """All servers are here: go on from their snapshots, if they have one in common."""
        with self.changed:
            return self._restore()

    def _restore(self) -> bool:
        meta, before = self.servers.restore(), self.step
        if meta is None:
            return False
        self._adopt(meta)
        self.ready = True
        self.changed.notify_all()
        self.book.event("server_restored", f"step {self.step}: the servers go on from their snapshot", step=self.step,
                        version=self.version, steps_lost=max(0, before - self.step))  # fmt: skip
        return True

    def meta(self) -> dict[str, Any]:
        """Where the run stands, beside its tensors."""
        pending = sorted({*self.todo, *(o.number for o in self.out.values()), *(c.number for c in self.come)})
        return {
            "mode": "server", "version": self.version, "consumed": self.consumed, "next": self.next,
            "pending": pending, "tokens": self.tokens, "shares": self.shares, "offset": self.offset,
        }  # fmt: skip

    def _adopt(self, meta: dict[str, Any]) -> None:
        self.incarnation += 1  # after which a version's number may mean other weights
        self.version, self.consumed = meta["version"], meta["consumed"]
        self.next, self.tokens, self.offset = meta["next"], meta["tokens"], meta["offset"]
        self.todo = deque(meta["pending"])
        self.out, self.come, self.sums = {}, [], [0.0, 0, 0, 0]

    # what is asked

    def answer(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        match head["do"]:
            case "next":
                return self._next(peer), {}
            case "done":
                return self._done(peer, head), {}
            case "back":  # the worker could not deliver
                with self.changed:
                    if (out := self.out.pop(head["key"], None)) is not None:
                        self.todo.append(out.number)
                        self.changed.notify_all()
                return {}, {}
            case "stage" | "read":
                return self.shard.answer(head, tensors)
        raise ValueError(f"a {peer.role} may not ask for {head['do']}")

    def _next(self, peer: Peer) -> dict[str, Any]:
        with self.changed:
            self.waiting.add(peer)
            self.changed.wait_for(lambda: self.ended or peer not in self.waiting or self._may_go_out())
            if self.ended or peer not in self.waiting:
                return {"stop": True}
            self.waiting.discard(peer)
            number = self.todo.popleft() if self.todo else self.next
            self.next = max(self.next, number + 1)
            self.issued += 1
            key = f"{number}.{self.issued}"
            self.out[key] = Out(number, peer, self.version, time.monotonic())
            step, share = divmod(number, self.shares)
            return {
                "key": key, "step": step, "share": share, "offset": self.offset, "servers": self.servers.addresses,
                "version": f"{self.incarnation}.{self.version}",
            }  # fmt: skip

    def _may_go_out(self) -> bool:
        if not self.ready or self._blocked():
            return False
        number = self.todo[0] if self.todo else self.next
        return number < self.total and (self.asynchronous or number // self.shares == self.step)

    def _blocked(self) -> bool:
        """Whether an update is due and waits for a worker that would fall too far behind."""
        oldest = min((o.version for o in self.out.values()), default=self.version + 1)
        return len(self.come) >= self.gather and self.version + 1 - oldest > self.sync.staleness

    def _done(self, peer: Peer, head: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            out = self.out.get(head["key"])
            if out is None or out.peer is not peer or not self.ready:
                return {"taken": False}
            del self.out[head["key"]]
            self.bytes += int(head.get("bytes", 0))
            self.come.append(Come(head["key"], out.number, out.version, float(head["loss"]), int(head["count"])))
            self._update_if_due()
            self.changed.notify_all()
            return {"taken": True}

    def _update_if_due(self) -> None:
        left = self.consumed + len(self.come) >= self.total  # nothing more will come
        if not self.come or not self.ready or self.ended or (len(self.come) < self.gather and not left):
            return
        if self.asynchronous and self._blocked():
            return
        if not self.asynchronous:
            self.come.sort(key=lambda c: c.number)  # one order of addition, whoever was first
        taken, self.come = self.come, []
        try:
            self._update(taken)
        except WireError as error:
            self.book.log.debug("an update failed: %s", error)
            for index in self.servers.silent():
                self._lost(index)

    def _update(self, taken: list[Come]) -> None:
        before, job = self.step, self.job
        keys, keep = [c.key for c in taken], list(self.out)
        square = sum(holder.gather(keys, keep) for holder in self.servers.all())
        count = max(1, sum(c.count for c in taken))
        norm = math.sqrt(square) / count
        loss = sum(c.loss for c in taken)
        if not self.book.finite(loss, norm):
            self.failed = (
                f"the {'loss' if not math.isfinite(loss) else 'gradient norm'} is not finite at step {before + 1}"
            )
            return
        clip = min(1.0, job.optim.clip / (norm + EPS)) if job.optim.clip else 1.0
        lr = rate(job, min(before + 1, job.train.steps))
        for holder in self.servers.all():
            holder.apply(lr, clip / count, self.version + 1)
        stale = sum(self.version - c.version for c in taken)
        self.sums = [a + b for a, b in zip(self.sums, (loss, count, stale, len(taken)), strict=True)]
        self.version += 1
        self.consumed += len(taken)
        self.tokens += sum(c.count for c in taken)
        if self.step > before:
            self._close_step(before, norm, lr)
        if self.version % self.sync.snapshot_every == 0:
            self.servers.snapshot(self.meta())

    def _close_step(self, before: int, norm: float, lr: float) -> None:
        loss, count, stale, number = self.sums
        self.sums, taken = [0.0, 0, 0, 0], self.step - before
        self.book.step(
            self.step, loss / max(1, count), round(count / taken), norm, lr, self.tokens, self.book.lap(taken),
            self.bytes,
            peak_memory_gib=peak_memory_gib(torch.device("cpu")), staleness=stale / max(1, number),
            workers=len(self.workers),
        )  # fmt: skip
        evaluates = self.book.due(before, self.step, self.job.train.eval_every) and self.job.train.eval_every > 0
        saves = self.book.due(before, self.step, self.job.checkpoint.every)
        if evaluates or saves:
            self.book.copies.put(self.copy(evaluates, saves))

    def copy(self, evaluates: bool, saves: bool) -> Copy:
        """The run as it is now. Whoever calls holds the lock, or nothing moves any more."""
        held = self.servers.read("all" if saves else "weights")
        return Copy(self.step, self.tokens, held, evaluates, saves, self.meta())
