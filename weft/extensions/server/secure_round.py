"""Server side of one round of secure aggregation: which client answers in which phase, and who dropped out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.extensions.server.secure_aggregation import unmask

PHASES = ("keys", "shares", "train", "unmask", "done")
"""Clients publish keys, share their secrets, send masked updates, and reveal the shares that remove the masks."""


class SecureRound:
    """Relays the messages between the clients of a round. A client that drops out leaves the later phases."""

    def __init__(self, clients: Iterable[int], threshold: int, length: int):
        """`length` is the number of values that each client sends."""
        self.threshold, self.length = threshold, length
        self.alive = list(clients)
        self.phase = PHASES[0]
        self.answered: set[int] = set()
        self.keys: dict[int, tuple[bytes, bytes]] = {}
        self.keyed: list[int] = []
        """Clients that published keys: all of them get shares, also if some drop out meanwhile."""
        self.sealed: dict[int, dict[int, bytes]] = {}
        self.sharing: list[int] = []
        """Clients whose masks are in the masked updates."""
        self.masked: dict[int, Tensor] = {}
        self.revealed: dict[int, dict[int, tuple[str, int]]] = {}

    @property
    def pending(self) -> list[int]:
        """Clients whose answer is missing in this phase."""
        return [c for c in self.alive if c not in self.answered]

    def task(self, client: int) -> dict[str, Any]:
        """What a client needs for this phase."""
        match self.phase:
            case "shares":
                return {"keys": {str(c): [key.hex() for key in self.keys[c]] for c in self.keyed}}
            case "train":
                return {"sealed": {str(c): self.sealed[c][client].hex() for c in self.sharing if c != client}}
            case "unmask":
                return {"survivors": sorted(self.masked)}
        return {}

    def answer(self, client: int, head: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take a client's answer; raises ValueError, KeyError or TypeError if it is invalid."""
        match self.phase:
            case "keys":
                transport, mask = (bytes.fromhex(key) for key in head["keys"])
                self.keys[client] = (transport, mask)
            case "shares":
                sealed = {int(c): bytes.fromhex(data) for c, data in head["sealed"].items()}
                if sealed.keys() != set(self.keyed) - {client}:
                    raise ValueError("it did not send a share to every other client")
                self.sealed[client] = sealed
            case "train":
                vector = tensors["vector"]
                if vector.dtype != torch.int64 or vector.shape != (self.length,):
                    raise ValueError(
                        f"its masked update is {vector.dtype} {list(vector.shape)}, not {self.length} int64"
                    )
                self.masked[client] = vector
            case "unmask":
                shares = {int(c): (str(kind), int(share, 16)) for c, (kind, share) in head["shares"].items()}
                if {c: kind for c, (kind, _) in shares.items()} != {
                    c: "own" if c in self.masked else "mask" for c in self.sharing
                }:
                    raise ValueError("it did not reveal the shares that are needed")
                self.revealed[client] = shares
        self.answered.add(client)
        self._advance()

    def drop(self, client: int) -> None:
        """A client left the round."""
        if client in self.alive:
            self.alive.remove(client)
            self._advance()

    def _advance(self) -> None:
        """The next phase, when every client that is left has answered."""
        if self.pending or self.phase in ("done", "failed"):
            return
        if len(self.alive) < self.threshold:
            self.phase = "failed"
            return
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        self.answered = set()
        if self.phase == "shares":
            self.keyed = list(self.alive)
        elif self.phase == "train":
            self.sharing = list(self.alive)

    def total(self) -> Tensor:
        """The sum of the masked updates without the masks."""
        return unmask(self.masked, {c: self.keys[c][1] for c in self.sharing}, self.revealed, self.threshold)
