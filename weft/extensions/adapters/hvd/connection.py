"""How requests of ranks reach the coordinator on rank 0, and how its answers come back.

Each rank has two authenticated connections to rank 0, one for requests and one for answers. The key is drawn by rank 0
and told to the others over the process group.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from typing import Protocol

from weft.extensions.adapters.hvd.coordinator import CollectiveCoordinator, Message
from weft.hardware.network import own_address
from weft.hardware.rank_environment import rank_info
from weft.mesh import Mesh
from weft.wire.channel import Channel, WireError, open_channel
from weft.wire.listener import Listener

CONNECT_TIMEOUT_S = 60.0
LEFT = "left without a word; its own output says why"


class Connection(Protocol):
    """A rank's way to the coordinator."""

    def send(self, request: Message) -> None:
        """Send a request."""

    def receive(self) -> Message | None:
        """Wait for the next answer; None after close()."""

    def close(self) -> None:
        """End the connection; receive() returns None."""


class HostConnection:
    """Rank 0's connection, which serves the other ranks."""

    def __init__(self, world: int) -> None:
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._outgoing: dict[int, Channel] = {}
        self._connected = threading.Condition()
        self._coordinator = CollectiveCoordinator(world, self._answer)
        self._world, self._listener = world, None
        self.secret = secrets.token_hex(32)
        if world > 1:
            here = rank_info()
            host = "127.0.0.1" if here.local_world == world else own_address()
            self._listener = Listener(
                self.secret.encode(), self._serve, lambda reason: None, host, "MASTER_ADDR", ack_timeout_s=None
            )

    @property
    def address(self) -> tuple[str, int] | None:
        return self._listener.address if self._listener is not None else None

    def await_ranks(self) -> None:
        """Wait until answers can be sent to every rank."""
        with self._connected:
            if not self._connected.wait_for(lambda: len(self._outgoing) == self._world - 1, CONNECT_TIMEOUT_S):
                missing = sorted(set(range(1, self._world)) - self._outgoing.keys())
                raise ConnectionError(f"ranks {missing} did not connect to rank 0 within {CONNECT_TIMEOUT_S:.0f} s")

    def _serve(self, channel: Channel) -> None:
        first, _ = channel.receive(CONNECT_TIMEOUT_S)
        rank = int(first["rank"])
        if first["for"] == "answers":
            with self._connected:
                self._outgoing[rank] = channel
                self._connected.notify_all()
            with contextlib.suppress(WireError):
                channel.receive(None)  # nothing comes: the thread keeps the connection open
            return
        why = LEFT
        try:
            while True:
                request, _ = channel.receive(None)
                if request["do"] == "leave":
                    why = "has called hvd.shutdown() or has ended"
                    break
                self._coordinator.receive(rank, request)
        except WireError:
            pass
        self._coordinator.leave(rank, why)

    def _answer(self, rank: int, answer: Message) -> None:
        if rank == 0:
            self._answers.put(answer)
            return
        with contextlib.suppress(WireError):  # its requests end too, which is noticed there
            self._outgoing[rank].send(answer, timeout_s=None)

    def send(self, request: Message) -> None:
        self._coordinator.receive(0, request)

    def receive(self) -> Message | None:
        return self._answers.get()

    def close(self) -> None:
        self._coordinator.leave(0, "has called hvd.shutdown() or has ended")
        self._answers.put(None)
        if self._listener is not None:
            self._listener.close()


class GuestConnection:
    """The connection of another rank."""

    def __init__(self, rank: int, address: tuple[str, int], secret: str) -> None:
        self._requests = self._open(rank, "requests", address, secret)
        self._answers = self._open(rank, "answers", address, secret)
        self._lock = threading.Lock()

    def _open(self, rank: int, purpose: str, address: tuple[str, int], secret: str) -> Channel:
        channel = open_channel(address, secret.encode(), CONNECT_TIMEOUT_S, ack_timeout_s=None)
        channel.send({"rank": rank, "for": purpose})
        return channel

    def send(self, request: Message) -> None:
        with self._lock:  # the order of a rank's requests is that of their frames
            self._requests.send(request, timeout_s=None)

    def receive(self) -> Message | None:
        return self._answers.receive(None)[0]

    def close(self) -> None:
        with contextlib.suppress(WireError):
            self.send({"do": "leave"})
        self._requests.close()
        self._answers.close()


def connect_ranks(mesh: Mesh) -> Connection:
    """Connect all ranks of a mesh to rank 0. Collective."""
    host = HostConnection(mesh.world) if mesh.rank == 0 else None
    if mesh.world == 1:
        assert host is not None
        return host
    address, secret = mesh.all_gather_json([host.address, host.secret] if host is not None else None)[0]
    if host is None:
        return GuestConnection(mesh.rank, (address[0], address[1]), secret)
    host.await_ranks()
    return host
