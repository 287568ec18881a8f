"""Coordinator of federated averaging: assigns clients to workers, rejects bad updates and averages the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.extensions.server.client_samples import sample_clients
from weft.extensions.server.connections import Peer
from weft.extensions.server.coordinator import RunCoordinator
from weft.extensions.server.federated_update import (
    ClientUpdate,
    OuterStep,
    RoundResult,
    add_noise,
    average,
    client_weights,
    clip_factor,
)
from weft.extensions.server.privacy import PrivacyAccountant, noise_generator
from weft.extensions.server.run_records import RunRecords, StateCopy
from weft.extensions.server.server_shard import Shard
from weft.extensions.server.update_checks import OutlierCheck, find_defect
from weft.job.schema import Job
from weft.optim.schedule import learning_rate
from weft.training.metrics import peak_memory_gib
from weft.wire.tensors import Answer


@dataclass(frozen=True)
class ClientAssignment:
    """A client that a worker computes for."""

    client: int
    peer: Peer
    since: float


class FederatedAveraging(RunCoordinator[ClientAssignment]):
    """FedAvg (McMahan et al. 2017): in each round some clients, sampled by the seed, train from the common weights, and
    their changes are averaged, weighted by their number of examples. The server counts the examples itself, so a client
    cannot inflate its weight.

    The clients' optimizer states are averaged like the weights, and the next round starts from the average; with a new
    optimizer a short round would learn little. With `clip` the state stays on the client, because the bound does not
    cover it. In a round of one step the mean gradient is a step of the server's own optimizer.
    """

    def __init__(self, job: Job, examples: list[int], shard: Shard, records: RunRecords, secret: bytes):
        """`examples` is the number of examples of each client; `secret` makes the noise."""
        super().__init__(job, shard, records)
        self.examples, self.secret = examples, secret
        self.outer = OuterStep(job, shard)
        self.accountant = PrivacyAccountant(self.sync.noise, self.sync.delta) if self.sync.noise else None
        self.done = self.round = 0
        """Completed steps and rounds."""
        self.todo: list[int] = []
        self.received: dict[int, ClientUpdate] = {}
        self.rejected: set[int] = set()
        self.outliers = OutlierCheck(self.sync.tolerance)

    @property
    def step(self) -> int:
        return self.done

    @property
    def steps(self) -> int:
        """Steps of the current round."""
        return min(self.sync.period, self.job.train.steps - self.step)

    @property
    def carries(self) -> bool:
        """Whether the current round continues with the optimizer state of the previous one."""
        return self.steps > 1 and not self.sync.clip

    @property
    def clients(self) -> list[int]:
        """The clients of the current round."""
        return sample_clients(self.sync.clients, self.sync.drawn, self.job.train.seed, self.round)

    @property
    def parts(self) -> float:
        """Number of equally large clients whose mean would have the same noise."""
        held = [self.examples[c] for c in self.clients]
        return sum(held) ** 2 / max(1, sum(n * n for n in held))

    def expected(self) -> dict[str, Tensor]:
        """Tensors that a client sends in the current round, by name."""
        state = self.shard.optimizers.shards() if self.carries else {}
        return {**self.shard.master_params, **{f"optim.{n}": t for n, t in state.items() if t.dim()}}

    # peers

    def left(self, peer: Peer) -> None:
        with self.changed:
            self.workers.discard(peer)
            if self.ended or peer.role != "worker":
                return
            lost = [out.client for out in self._take_back(peer)]
            note = f"step {self.step}: {peer.name} disconnected"
            self.records.event("worker_lost", note, worker=peer.name, step=self.step, shares=len(lost))
            self._release(peer, lost)
            self.changed.notify_all()

    def _release(self, peer: Peer, clients: list[int]) -> None:
        """A worker is lost: its clients are assigned to others."""
        self.todo += clients

    # state

    def begin(self, tensors: dict[str, Tensor], sync: dict[str, Any]) -> None:
        with self.changed:
            self.shard.load(tensors, 0)
            self._adopt({"round": 0, **sync})
            self.shard.snapshot(self.meta())

    def resume(self) -> bool:
        with self.changed:
            if not (found := self.shard.snapshots()):
                return False
            self._adopt(self.shard.restore(found[-1]))
            return True

    def meta(self) -> dict[str, Any]:
        return {
            "mode": "federated", "round": self.round, "step": self.step, "tokens": self.tokens, "offset": self.offset,
            "velocity": bool(self.shard.extra), "norms": self.outliers.norms,
            "privacy": self.accountant.state() if self.accountant else {},
        }  # fmt: skip

    def _adopt(self, meta: dict[str, Any]) -> None:
        self.round, self.done, self.tokens = meta["round"], meta["step"], meta["tokens"]
        self.offset, self.outliers.norms = meta["offset"], dict(meta.get("norms", {}))
        if self.accountant:
            self.accountant = PrivacyAccountant(self.sync.noise, self.sync.delta, meta.get("privacy"))
        self._open_round()
        self.ready = True
        self.changed.notify_all()

    def _open_round(self) -> None:
        self.todo = self.clients
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
                **self._details(client, peer),
            }  # fmt: skip

    def _details(self, client: int, peer: Peer) -> dict[str, Any]:
        """More fields of a client's task."""
        return {}

    def _client_for(self, peer: Peer) -> int | None:
        """A client for this worker: its own if it has one, else any that no worker has reserved."""
        if not self.ready:
            return None
        own = peer.about.get("client")
        taken = {p.about["client"] for p in self.workers if "client" in p.about}
        return next((c for c in self.todo if c == own or (own is None and c not in taken)), None)

    def _done(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        with self.changed:
            if (out := self._take_result(peer, head)) is None:
                return {"taken": False}
            why = self._take(out.client, peer.name, head, tensors)
            if why is not None:
                self._reject(out.client, peer.name, why)
            self._continue()
            self.changed.notify_all()
            return {"taken": why is None}

    def _take(self, client: int, worker: str, head: dict[str, Any], tensors: dict[str, Tensor]) -> str | None:
        """Keep a client's update; returns the reason if it is invalid."""
        if why := find_defect(tensors, self.expected()):
            return why
        figures = [[float(x) for x in head[what]] for what in ("losses", "counts", "norms")]
        if any(len(x) != self.steps for x in figures):
            return f"it reports {len(figures[0])} steps instead of {self.steps}"
        self.received[client] = ClientUpdate(worker, {n: t.float() for n, t in tensors.items()}, *figures)
        return None

    def _continue(self) -> None:
        """End the round when every client has answered."""
        if not self.todo and not self.assigned:
            self._close_round(self._average())

    def _reject(self, client: int, worker: str, why: str) -> None:
        self.rejected.add(client)
        self.records.event(
            "rejected", f"round {self.round + 1}: the update of client {client} is rejected: {why}",
            client=client, worker=worker, round=self.round + 1, step=self.step, why=why,
        )  # fmt: skip

    def _average(self) -> RoundResult:
        """The mean of the accepted updates, clipped, with noise."""
        sync = self.sync
        kind = "change" if self.steps > 1 else "gradient"
        found, sizes = self.outliers.check({c: u.sent for c, u in self.received.items()}, kind)
        for client, why in found.items():
            self._reject(client, self.received.pop(client).worker, why)
        weights = client_weights(self.received, self.examples, bool(sync.noise))
        factors = {c: weight * clip_factor(sizes[c], sync.clip) for c, weight in weights.items()}
        result = average(self.received, factors, self.steps)
        if not (sync.noise and result.clients):
            return result
        deviation = sync.noise * sync.clip / len(result.clients)
        return replace(result, mean=add_noise(result.mean, deviation, noise_generator(self.secret, self.round)))

    def _close_round(self, result: RoundResult) -> None:
        before, steps = self.step, self.steps
        if result.clients:
            self.outer.apply(result.mean, before, steps, self.carries, self.round + 1)
        privacy = self._account(result.clients)
        seconds = self.records.lap(steps)
        for i in range(steps):
            self._record(before + i, i, seconds, result, privacy)
        self.done, self.round = before + steps, self.round + 1
        evaluates, saves = self.records.due_at(before, self.step)
        if evaluates or saves:
            self.records.copies.put(self.copy(evaluates, saves))
        self.shard.snapshot(self.meta())
        self._open_round()

    def _account(self, clients: list[int]) -> dict[str, float]:
        """The privacy loss so far, printed and written with the round's metrics; nothing without noise."""
        if self.accountant is None:
            return {}
        self.accountant.add_round(clients)
        privacy = {"epsilon": self.accountant.epsilon, "delta": self.accountant.delta}
        note = f"round {self.round + 1}: epsilon {privacy['epsilon']:.3f} at delta {privacy['delta']:g}"
        self.records.event("privacy", note, round=self.round + 1, step=self.step + self.steps, **privacy)
        return privacy

    def _record(self, step: int, i: int, seconds: float, result: RoundResult, privacy: dict[str, float]) -> None:
        count = round(result.counts[i])
        self.tokens += count
        self.records.step(
            step + 1, result.losses[i] / max(1, count), count, result.norms[i], learning_rate(self.job, step + 1),
            self.tokens, seconds, self.bytes,
            peak_memory_gib=peak_memory_gib(torch.device("cpu")), round=self.round + 1, clients=result.clients,
            rejected=sorted(self.rejected), workers=len(self.workers), **privacy,
        )  # fmt: skip

    def copy(self, evaluates: bool, saves: bool) -> StateCopy:
        return StateCopy(
            self.step, self.tokens, self.shard.read("all" if saves else "weights"), evaluates, saves, self.meta()
        )
