"""The desk of federated averaging: clients train a while on data of their own, and what can be trusted is averaged."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.job.schema import Job
from weft.optim.schedule import rate
from weft.server.client_data import draw, drawn
from weft.server.connections import Peer
from weft.server.records import Book, Copy
from weft.server.shard import Shard
from weft.server.update_checks import flaw, norm, outliers
from weft.training.metrics import peak_memory_gib
from weft.wire.tensors import Answer

REMEMBERED = 50
"""Norms of earlier updates that are kept, for rounds of few clients."""


@dataclass(frozen=True)
class Out:
    """A client whose data a worker trains on."""

    client: int
    peer: Peer
    since: float


@dataclass(frozen=True)
class Update:
    """What came back."""

    worker: str
    sent: dict[str, Tensor]
    """A gradient, or how far the weights went and what the optimizer remembers (`optim.…`)."""
    losses: list[float]
    counts: list[float]
    norms: list[float]


class Averaging:
    """FedAvg (McMahan et al. 2017): each round some clients, drawn by the seed, train from the common weights; their
    changes are averaged by how many examples each has. The server alone knows those numbers: nobody can inflate his.

    What clients' optimizers remember is averaged like the weights, and the next round begins with it (an optimizer that
    began anew would be lost for most of a short round). With `clip` it never leaves the clients: it is not covered by
    the bound. In a round of one step the mean gradient makes a step of the server's own optimizer.
    """

    def __init__(self, job: Job, examples: list[int], shard: Shard, book: Book):
        self.job, self.examples, self.shard, self.book = job, examples, shard, book
        self.sync = job.train.sync
        self.rate, self.momentum = self.sync.outer
        if self.momentum:
            shard.extra = {f"outer.velocity.{n}": torch.zeros_like(m.detach()) for n, m in shard.masters.items()}
        self.changed = threading.Condition()
        self.workers: set[Peer] = set()
        self.step = self.round = self.tokens = self.issued = self.offset = 0
        self.todo: list[int] = []
        self.out: dict[str, Out] = {}
        self.come: dict[int, Update] = {}
        self.refused: set[int] = set()
        self.norms: dict[str, list[float]] = {}
        """Of earlier updates, by what they are of."""
        self.ready = self.stop = False
        self.failed: str | None = None
        self.bytes = 0
        """That workers sent and received, by what they tell."""

    @property
    def ended(self) -> bool:
        return self.stop or self.failed is not None or self.step >= self.job.train.steps

    @property
    def steps(self) -> int:
        """Of the round under way."""
        return min(self.sync.period, self.job.train.steps - self.step)

    @property
    def carries(self) -> bool:
        """Whether the round under way goes on with the optimizer of the one before."""
        return self.steps > 1 and not self.sync.clip

    @property
    def parts(self) -> float:
        """How many clients with equally many examples would make a mean of as little noise."""
        held = [self.examples[c] for c in drawn(self.sync.clients, self.sync.drawn, self.job.train.seed, self.round)]
        return sum(held) ** 2 / max(1, sum(n * n for n in held))

    def expected(self) -> dict[str, Tensor]:
        """What a client sends in the round under way, by name and shape."""
        state = self.shard.optimizers.pieces() if self.carries else {}
        return {**self.shard.masters, **{f"optim.{n}": t for n, t in state.items() if t.dim()}}

    # who comes and goes

    def arrived(self, peer: Peer) -> None:
        with self.changed:
            if peer.role == "worker":
                self.workers.add(peer)
                self.book.event("worker_joined", worker=peer.name, step=self.step)
                self.changed.notify_all()

    def gone(self, peer: Peer) -> None:
        with self.changed:
            self.workers.discard(peer)
            if self.ended or peer.role != "worker":
                return
            lost = [key for key, out in self.out.items() if out.peer is peer]
            self.todo += [self.out.pop(key).client for key in lost]
            note = f"step {self.step}: {peer.name} is gone" + (": its client goes to another" if lost else "")
            self.book.event("worker_lost", note, worker=peer.name, step=self.step, shares=len(lost))
            self.changed.notify_all()

    def tick(self) -> None:
        """Now and then: give up on workers that take too long."""
        with self.changed:
            late = time.monotonic() - self.job.comm.timeout_s
            slow = [out.peer for out in self.out.values() if out.since < late]
        for peer in slow:
            peer.link.close()

    def whole(self) -> bool:
        return True

    def halt(self) -> None:
        with self.changed:
            self.stop = True
            self.changed.notify_all()

    # from which state

    def begin(self, tensors: dict[str, Tensor], sync: dict[str, Any]) -> None:
        with self.changed:
            self.shard.load(tensors, 0)
            self._adopt({"round": 0, **sync})
            self.shard.snapshot(self.meta())

    def resume(self) -> bool:
        """From the snapshot of a chief that was killed."""
        with self.changed:
            if not (found := self.shard.snapshots()):
                return False
            self._adopt(self.shard.restore(found[-1]))
            return True

    def meta(self) -> dict[str, Any]:
        return {
            "mode": "federated", "round": self.round, "step": self.step, "tokens": self.tokens, "offset": self.offset,
            "velocity": bool(self.shard.extra), "norms": self.norms,
        }  # fmt: skip

    def _adopt(self, meta: dict[str, Any]) -> None:
        self.round, self.step, self.tokens = meta["round"], meta["step"], meta["tokens"]
        self.offset, self.norms = meta["offset"], dict(meta.get("norms", {}))
        self._open_round()
        self.ready = True
        self.changed.notify_all()

    def _open_round(self) -> None:
        self.todo = drawn(self.sync.clients, self.sync.drawn, self.job.train.seed, self.round)
        self.out, self.come, self.refused = {}, {}, set()

    # what is asked

    def answer(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        match head["do"]:
            case "next":
                return self._next(peer), {}
            case "done":
                return self._done(peer, head, tensors), {}
            case "read":
                return self.shard.answer({"do": "read", "what": "all" if head["what"] == "all" else "weights"}, {})
        raise ValueError(f"a {peer.role} may not ask for {head['do']}")

    def _next(self, peer: Peer) -> dict[str, Any]:
        with self.changed:
            self.changed.wait_for(lambda: self.ended or peer not in self.workers or self._for(peer) is not None)
            client = self._for(peer)
            if self.ended or client is None:
                return {"stop": True}
            self.todo.remove(client)
            self.issued += 1
            key = f"{self.round}.{client}.{self.issued}"
            self.out[key] = Out(client, peer, time.monotonic())
            return {
                "key": key, "client": client, "round": self.round, "step": self.step, "steps": self.steps,
                "servers": [""], "version": str(self.round), "carries": self.carries, "parts": self.parts,
            }  # fmt: skip

    def _for(self, peer: Peer) -> int | None:
        """A client for this worker: its own, if it is one's, else any that is nobody's."""
        if not self.ready:
            return None
        own = peer.about.get("client")
        taken = {p.about["client"] for p in self.workers if "client" in p.about}
        return next((c for c in self.todo if c == own or (own is None and c not in taken)), None)

    def _done(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        with self.changed:
            out = self.out.get(head["key"])
            if out is None or out.peer is not peer:
                return {"taken": False}
            del self.out[head["key"]]
            self.bytes += int(head.get("bytes", 0))
            why = flaw(tensors, self.expected())
            told = [[float(x) for x in head[what]] for what in ("losses", "counts", "norms")]
            if why is None and any(len(x) != self.steps for x in told):
                why = f"it tells of {len(told[0])} steps instead of {self.steps}"
            if why is None:
                self.come[out.client] = Update(peer.name, {n: t.float() for n, t in tensors.items()}, *told)
            else:
                self._refuse(out.client, peer.name, why)
            if not self.todo and not self.out:
                self._close_round()
            self.changed.notify_all()
            return {"taken": why is None}

    def _refuse(self, client: int, worker: str, why: str) -> None:
        self.refused.add(client)
        self.book.event(
            "rejected", f"round {self.round + 1}: the update of client {client} is rejected: {why}",
            client=client, worker=worker, round=self.round + 1, step=self.step, why=why,
        )  # fmt: skip

    def _close_round(self) -> None:
        sizes = self._trusted()
        if self.come:
            self._average(sizes)
        before, steps = self.step, self.steps
        seconds = self.book.lap(steps)
        for i in range(steps):
            self._record(before + i, i, seconds)
        self.step, self.round = before + steps, self.round + 1
        evaluates = self.book.due(before, self.step, self.job.train.eval_every) and self.job.train.eval_every > 0
        saves = self.book.due(before, self.step, self.job.checkpoint.every)
        if evaluates or saves:
            self.book.copies.put(self.copy(evaluates, saves))
        self.shard.snapshot(self.meta())
        self._open_round()

    def _trusted(self) -> dict[int, float]:
        """Refuse updates of which something is far larger than the others'; the norms of the rest."""
        kinds: dict[str, list[str]] = {}
        for name in self.expected():
            kinds.setdefault(name.rpartition(".")[2] if name.startswith("optim.") else self._what, []).append(name)
        told: dict[str, dict[int, float]] = {}
        for kind, names in kinds.items():
            sizes = {c: norm({n: u.sent[n] for n in names}) for c, u in self.come.items()}
            for client, why in outliers(sizes, self.norms.get(kind, []), self.sync.tolerance).items():
                self._refuse(client, self.come.pop(client).worker, why if kind == self._what else f"{kind}: {why}")
            told[kind] = sizes
        for kind, sizes in told.items():
            kept = [size for client, size in sizes.items() if client in self.come]
            self.norms[kind] = [*self.norms.get(kind, []), *kept][-REMEMBERED:]
        return told[self._what]

    @property
    def _what(self) -> str:
        return "change" if self.steps > 1 else "gradient"

    @torch.no_grad()
    def _average(self, sizes: dict[int, float]) -> None:
        """The outer step: clipped changes, averaged by examples, with noise, and momentum where it is wanted."""
        clip, total = self.sync.clip, sum(self.examples[c] for c in self.come)
        shares = {
            c: self.examples[c] / total * (min(1.0, clip / max(sizes[c], 1e-12)) if clip else 1.0) for c in self.come
        }
        mean: dict[str, Tensor] = {}
        for name in self.expected():
            mean[name] = torch.stack([self.come[c].sent[name] * shares[c] for c in sorted(self.come)]).sum(0)
        if spread := self.sync.noise * clip / len(self.come):
            random = draw(self.job.train.seed, f"noise {self.round}")
            for name, tensor in mean.items():
                mean[name] = tensor + torch.from_numpy(random.normal(0, spread, tuple(tensor.shape))).float()
        before = {n: m.detach().clone() for n, m in self.shard.masters.items()}
        self._step_or_take(mean)
        with self.shard.lock:
            for name, master in self.shard.masters.items():
                way = before[name] - master.detach()
                if self.shard.extra:
                    velocity = self.shard.extra[f"outer.velocity.{name}"].mul_(self.momentum).add_(way)
                    way = way + self.momentum * velocity
                if self.shard.extra or self.rate != 1:
                    master.detach().copy_(before[name] - self.rate * way)
            self.shard.version = self.round + 1

    def _step_or_take(self, mean: dict[str, Tensor]) -> None:
        """Bring the weights, and what the optimizer remembers, to where the clients' mean says."""
        masters, optim, version = self.shard.masters, self.job.optim, self.round + 1
        if self.steps == 1:
            size = norm(mean)
            factor = min(1.0, optim.clip / (size + 1e-6)) if optim.clip else 1.0
            for name, master in masters.items():
                master.grad = mean[name].to(master.dtype)
            self.shard.apply(rate(self.job, self.step + 1), factor, version)
            return
        with self.shard.lock:
            for name, master in masters.items():
                master.detach().add_(mean[name])
            for name, held in self.shard.optimizers.pieces().items() if self.carries else ():
                if not held.dim():
                    held.add_(self.steps)  # it counts steps
                else:
                    held.copy_(mean[f"optim.{name}"])
                if name.endswith(".exp_avg_sq"):
                    held.clamp_(min=0)  # no square is below it, whatever a client says

    def _record(self, step: int, i: int, seconds: float) -> None:
        updates = list(self.come.values())
        count = sum(u.counts[i] for u in updates)
        self.tokens += int(count)
        self.book.step(
            step + 1, sum(u.losses[i] for u in updates) / max(1.0, count), int(count),
            sum(u.norms[i] for u in updates) / max(1, len(updates)), rate(self.job, step + 1), self.tokens, seconds,
            self.bytes,
            peak_memory_gib=peak_memory_gib(torch.device("cpu")), round=self.round + 1,
            clients=sorted(self.come), rejected=sorted(self.refused), workers=len(self.workers),
        )  # fmt: skip

    def copy(self, evaluates: bool, saves: bool) -> Copy:
        return Copy(
            self.step, self.tokens, self.shard.read("all" if saves else "weights"), evaluates, saves, self.meta()
        )
