"""Coordinator of federated averaging with secure aggregation: the server sees only the sum of the clients' updates."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.extensions.server.connections import Peer
from weft.extensions.server.federated_averaging import FederatedAveraging
from weft.extensions.server.federated_update import client_weights, packed_length, unpack
from weft.extensions.server.secure_round import SecureRound


class SecureAveraging(FederatedAveraging):
    """Federated averaging in the phases of a SecureRound. A client's keys are on one worker; if that worker is lost,
    the client drops out of the round."""

    secure: SecureRound
    phase: str
    owners: dict[int, Peer]
    """The worker with a client's keys."""

    @property
    def carries(self) -> bool:
        """Optimizer states are not sent: second moments are below the fixed-point precision."""
        return False

    def _open_round(self) -> None:
        super()._open_round()
        self.secure = SecureRound(self.todo, self.sync.quorum, packed_length(self.expected(), self.steps))
        self.phase, self.owners = self.secure.phase, {}

    def _client_for(self, peer: Peer) -> int | None:
        own = next((c for c in self.todo if self.owners.get(c) is peer), None)
        if own is not None or not self.ready:
            return own
        client = super()._client_for(peer)
        return None if client in self.owners else client

    def _details(self, client: int, peer: Peer) -> dict[str, Any]:
        self.owners[client] = peer
        return {"phase": self.phase, "weight": self._weights()[client], **self.secure.task(client)}

    def _weights(self) -> dict[int, float]:
        return client_weights(self.clients, self.examples, equal=bool(self.sync.noise))

    def _release(self, peer: Peer, clients: list[int]) -> None:
        """The clients of a lost worker drop out, except those that have not published a key yet."""
        for client in [c for c, owner in self.owners.items() if owner is peer]:
            del self.owners[client]
            self.todo = [c for c in self.todo if c != client]
            if self.secure.phase == "keys" and client in self.secure.pending:
                self.todo.append(client)
                continue
            self.records.event(
                "client_dropped", f"round {self.round + 1}: client {client} dropped out", client=client,
                round=self.round + 1, step=self.step, phase=self.secure.phase,
            )  # fmt: skip
            self.secure.drop(client)
        self._continue()

    def _take(self, client: int, worker: str, head: dict[str, Any], tensors: dict[str, Tensor]) -> str | None:
        """Pass a client's answer to the secure round; a client with an invalid answer drops out."""
        try:
            self.secure.answer(client, head, tensors)
        except (ValueError, KeyError, TypeError) as error:
            self.secure.drop(client)
            return f"{type(error).__name__} in phase {self.phase}: {error}"
        return None

    def _continue(self) -> None:
        """Assign the tasks of a new phase, or end the round."""
        if self.phase == self.secure.phase:
            return
        self.phase = self.secure.phase
        if self.phase == "failed":
            note = f"round {self.round + 1}: fewer than {self.sync.quorum} clients are left; it starts again"
            self.records.event("round_failed", note, round=self.round + 1, step=self.step)
            self._open_round()
        elif self.phase == "done":
            clients = sorted(self.secure.masked)
            weight = sum(self._weights()[c] for c in clients)
            self._close_round(unpack(self.secure.total(), self.expected(), clients, weight, self.steps))
        else:
            self.todo = self.secure.pending
