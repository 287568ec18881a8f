"""Coordinator of federated averaging: assigns clients to workers, rejects bad updates and averages the rest."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.job.schema import Job
from weft.optim.schedule import learning_rate
from weft.server.client_samples import random_generator, sample_clients
from weft.server.connections import Peer
from weft.server.records import RunRecords, StateCopy
from weft.server.shard import Shard
from weft.server.update_checks import find_defect, norm, outliers
from weft.training.metrics import peak_memory_gib
from weft.wire.tensors import Answer

KEPT_NORMS = 50
"""Norms of earlier updates that are kept for rounds with few clients."""


@dataclass(frozen=True)
class ClientAssignment:
    """A client that a worker computes for."""

    client: int
    peer: Peer
    since: float


@dataclass(frozen=True)
class ClientUpdate:
    """A client's result of a round."""

    worker: str
    sent: dict[str, Tensor]
    """A gradient, or the change of the weights and the optimizer state (`optim.…`)."""
    losses: list[float]
    counts: list[float]
    norms: list[float]


class FederatedAveraging:
    """FedAvg (McMahan et al. 2017): in each round some clients, sampled by the seed, train from the common weights, and
    their changes are averaged, weighted by their number of examples. The server counts the examples itself, so a client
    cannot inflate its weight.

    The clients' optimizer states are averaged like the weights, and the next round starts from the average; with a new
    optimizer a short round would learn little. With `clip` the state stays on the client, because the bound does not
    cover it. In a round of one step the mean gradient is a step of the server's own optimizer.
    """

    def __init__(self, job: Job, examples: list[int], shard: Shard, records: RunRecords):
        self.job, self.examples, self.shard, self.records = job, examples, shard, records
        self.sync = job.train.sync
        self.rate, self.momentum = self.sync.outer
        if self.momentum:
            shard.extra = {f"outer.velocity.{n}": torch.zeros_like(m.detach()) for n, m in shard.master_params.items()}
        self.changed = threading.Condition()
        self.workers: set[Peer] = set()
        self.step = self.round = self.tokens = self.issued = self.offset = 0
        self.todo: list[int] = []
        self.assigned: dict[str, ClientAssignment] = {}
        self.received: dict[int, ClientUpdate] = {}
        self.rejected: set[int] = set()
        self.norms: dict[str, list[float]] = {}
        """Norms of earlier updates, by kind of tensor."""
        self.ready = self.stop = False
        self.failed: str | None = None
        self.bytes = 0
        """Traffic of all workers, as they report it."""

    @property
    def ended(self) -> bool:
        return self.stop or self.failed is not None or self.step >= self.job.train.steps

    @property
    def steps(self) -> int:
        """Steps of the current round."""
        return min(self.sync.period, self.job.train.steps - self.step)

    @property
    def carries(self) -> bool:
        """Whether the current round continues with the optimizer state of the previous one."""
        return self.steps > 1 and not self.sync.clip

    @property
    def parts(self) -> float:
        """Number of equally large clients whose mean would have the same noise."""
        held = [
            self.examples[c]
            for c in sample_clients(self.sync.clients, self.sync.drawn, self.job.train.seed, self.round)
        ]
        return sum(held) ** 2 / max(1, sum(n * n for n in held))

    def expected(self) -> dict[str, Tensor]:
        """Tensors that a client sends in the current round, by name."""
        state = self.shard.optimizers.shards() if self.carries else {}
        return {**self.shard.master_params, **{f"optim.{n}": t for n, t in state.items() if t.dim()}}

    def finished(self) -> bool:
        """Whether no more updates are made and no copy is queued. Rounds queue their copy under the same lock."""
        with self.changed:
            return self.ended and self.records.copies.empty()

    # peers

    def joined(self, peer: Peer) -> None:
        with self.changed:
            if peer.role == "worker":
                self.workers.add(peer)
                self.records.event("worker_joined", worker=peer.name, step=self.step)
                self.changed.notify_all()

    def left(self, peer: Peer) -> None:
        with self.changed:
            self.workers.discard(peer)
            if self.ended or peer.role != "worker":
                return
            lost = [key for key, out in self.assigned.items() if out.peer is peer]
            self.todo += [self.assigned.pop(key).client for key in lost]
            note = f"step {self.step}: {peer.name} disconnected"
            note += "; its client is assigned to another worker" if lost else ""
            self.records.event("worker_lost", note, worker=peer.name, step=self.step, shares=len(lost))
            self.changed.notify_all()

    def tick(self) -> None:
        """Called periodically: disconnect workers that exceed comm.timeout_s."""
        with self.changed:
            late = time.monotonic() - self.job.comm.timeout_s
            slow = [out.peer for out in self.assigned.values() if out.since < late]
        for peer in slow:
            peer.link.close()

    def complete(self) -> bool:
        return True

    def stop_updates(self) -> None:
        with self.changed:
            self.stop = True
            self.changed.notify_all()

    # state

    def begin(self, tensors: dict[str, Tensor], sync: dict[str, Any]) -> None:
        with self.changed:
            self.shard.load(tensors, 0)
            self._adopt({"round": 0, **sync})
            self.shard.snapshot(self.meta())

    def resume(self) -> bool:
        """Restore the snapshot of a chief that was killed; returns whether there is one."""
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
        self.todo = sample_clients(self.sync.clients, self.sync.drawn, self.job.train.seed, self.round)
        self.assigned, self.received, self.rejected = {}, {}, set()

    # requests

    def handle(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        match head["do"]:
            case "next":
                return self._next(peer), {}
            case "done":
                return self._done(peer, head, tensors), {}
            case "read":
                return self.shard.handle({"do": "read", "what": "all" if head["what"] == "all" else "weights"}, {})
        raise ValueError(f"a {peer.role} may not request {head['do']!r}")

    def _next(self, peer: Peer) -> dict[str, Any]:
        with self.changed:
            self.changed.wait_for(lambda: self.ended or peer not in self.workers or self._client_for(peer) is not None)
            client = self._client_for(peer)
            if self.ended or client is None:
                return {"stop": True}
            self.todo.remove(client)
            self.issued += 1
            key = f"{self.round}.{client}.{self.issued}"
            self.assigned[key] = ClientAssignment(client, peer, time.monotonic())
            return {
                "key": key, "client": client, "round": self.round, "step": self.step, "steps": self.steps,
                "servers": [""], "version": str(self.round), "carries": self.carries, "parts": self.parts,
            }  # fmt: skip

    def _client_for(self, peer: Peer) -> int | None:
        """A client for this worker: its own if it has one, else any that no worker has reserved."""
        if not self.ready:
            return None
        own = peer.about.get("client")
        taken = {p.about["client"] for p in self.workers if "client" in p.about}
        return next((c for c in self.todo if c == own or (own is None and c not in taken)), None)

    def _done(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        with self.changed:
            out = self.assigned.get(head["key"])
            if out is None or out.peer is not peer:
                return {"taken": False}
            del self.assigned[head["key"]]
            self.bytes += int(head.get("bytes", 0))
            why = find_defect(tensors, self.expected())
            told = [[float(x) for x in head[what]] for what in ("losses", "counts", "norms")]
            if why is None and any(len(x) != self.steps for x in told):
                why = f"it reports {len(told[0])} steps instead of {self.steps}"
            if why is None:
                self.received[out.client] = ClientUpdate(peer.name, {n: t.float() for n, t in tensors.items()}, *told)
            else:
                self._reject(out.client, peer.name, why)
            if not self.todo and not self.assigned:
                self._close_round()
            self.changed.notify_all()
            return {"taken": why is None}

    def _reject(self, client: int, worker: str, why: str) -> None:
        self.rejected.add(client)
        self.records.event(
            "rejected", f"round {self.round + 1}: the update of client {client} is rejected: {why}",
            client=client, worker=worker, round=self.round + 1, step=self.step, why=why,
        )  # fmt: skip

    def _close_round(self) -> None:
        sizes = self._reject_outliers()
        if self.received:
            self._average(sizes)
        before, steps = self.step, self.steps
        seconds = self.records.lap(steps)
        for i in range(steps):
            self._record(before + i, i, seconds)
        self.step, self.round = before + steps, self.round + 1
        evaluates, saves = self.records.due_at(before, self.step)
        if evaluates or saves:
            self.records.copies.put(self.copy(evaluates, saves))
        self.shard.snapshot(self.meta())
        self._open_round()

    def _reject_outliers(self) -> dict[int, float]:
        """Reject updates with a norm far above the others'. Returns the norms of all updates."""
        kinds: dict[str, list[str]] = {}
        for name in self.expected():
            kinds.setdefault(name.rpartition(".")[2] if name.startswith("optim.") else self._what, []).append(name)
        told: dict[str, dict[int, float]] = {}
        for kind, names in kinds.items():
            sizes = {c: norm({n: u.sent[n] for n in names}) for c, u in self.received.items()}
            for client, why in outliers(sizes, self.norms.get(kind, []), self.sync.tolerance).items():
                self._reject(client, self.received.pop(client).worker, why if kind == self._what else f"{kind}: {why}")
            told[kind] = sizes
        for kind, sizes in told.items():
            kept = [size for client, size in sizes.items() if client in self.received]
            self.norms[kind] = [*self.norms.get(kind, []), *kept][-KEPT_NORMS:]
        return told[self._what]

    @property
    def _what(self) -> str:
        return "change" if self.steps > 1 else "gradient"

    @torch.no_grad()
    def _average(self, sizes: dict[int, float]) -> None:
        """The outer step: clipped changes, averaged by examples, plus noise and momentum if set."""
        clip, total = self.sync.clip, sum(self.examples[c] for c in self.received)
        shares = {
            c: self.examples[c] / total * (min(1.0, clip / max(sizes[c], 1e-12)) if clip else 1.0)
            for c in self.received
        }
        mean: dict[str, Tensor] = {}
        for name in self.expected():
            mean[name] = torch.stack([self.received[c].sent[name] * shares[c] for c in sorted(self.received)]).sum(0)
        if spread := self.sync.noise * clip / len(self.received):
            random = random_generator(self.job.train.seed, f"noise {self.round}")
            for name, tensor in mean.items():
                mean[name] = tensor + torch.from_numpy(random.normal(0, spread, tuple(tensor.shape))).float()
        before = {n: m.detach().clone() for n, m in self.shard.master_params.items()}
        self._apply_mean(mean)
        with self.shard.lock:
            for name, master in self.shard.master_params.items():
                way = before[name] - master.detach()
                if self.shard.extra:
                    velocity = self.shard.extra[f"outer.velocity.{name}"].mul_(self.momentum).add_(way)
                    way = way + self.momentum * velocity
                if self.shard.extra or self.rate != 1:
                    master.detach().copy_(before[name] - self.rate * way)
            self.shard.version = self.round + 1

    def _apply_mean(self, mean: dict[str, Tensor]) -> None:
        """Update weights and optimizer state with the mean of the clients."""
        master_params, optim, version = self.shard.master_params, self.job.optim, self.round + 1
        if self.steps == 1:
            size = norm(mean)
            factor = min(1.0, optim.clip / (size + 1e-6)) if optim.clip else 1.0
            for name, master in master_params.items():
                master.grad = mean[name].to(master.dtype)
            self.shard.apply(learning_rate(self.job, self.step + 1), factor, version)
            return
        with self.shard.lock:
            for name, master in master_params.items():
                master.detach().add_(mean[name])
            for name, held in self.shard.optimizers.shards().items() if self.carries else ():
                if not held.dim():
                    held.add_(self.steps)  # the step counter
                else:
                    held.copy_(mean[f"optim.{name}"])
                if name.endswith(".exp_avg_sq"):
                    held.clamp_(min=0)  # a second moment is not negative, whatever a client sends

    def _record(self, step: int, i: int, seconds: float) -> None:
        updates = list(self.received.values())
        count = sum(u.counts[i] for u in updates)
        self.tokens += int(count)
        self.records.step(
            step + 1, sum(u.losses[i] for u in updates) / max(1.0, count), int(count),
            sum(u.norms[i] for u in updates) / max(1, len(updates)), learning_rate(self.job, step + 1), self.tokens,
            seconds, self.bytes,
            peak_memory_gib=peak_memory_gib(torch.device("cpu")), round=self.round + 1,
            clients=sorted(self.received), rejected=sorted(self.rejected), workers=len(self.workers),
        )  # fmt: skip

    def copy(self, evaluates: bool, saves: bool) -> StateCopy:
        return StateCopy(
            self.step, self.tokens, self.shard.read("all" if saves else "weights"), evaluates, saves, self.meta()
        )
