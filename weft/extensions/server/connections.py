"""Connections of a server: one thread a peer, which passes requests to the coordinator and returns its answers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from weft.job.schema import Job
from weft.wire.channel import Channel, WireError
from weft.wire.listener import Listener
from weft.wire.tensors import Answer, TensorChannel

HELLO_TIMEOUT_S = 60.0
"""Time for an authenticated peer to send its first message."""


@dataclass(eq=False)
class Peer:
    """A connected process."""

    name: str
    role: str
    link: TensorChannel
    about: dict[str, Any] = field(default_factory=dict)
    """Fields of its first message."""


class Coordinator(Protocol):
    """Answers the requests of peers. Methods are called from several threads and may block."""

    def joined(self, peer: Peer) -> None: ...

    def handle(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> Answer: ...

    def left(self, peer: Peer) -> None: ...


class Connections:
    """Listens on a socket and serves every authenticated peer until it disconnects."""

    def __init__(self, job: Job, secret: bytes, coordinator: Coordinator, log: logging.Logger):
        host = job.train.sync.host
        self.coordinator, self.log = coordinator, log
        self.peers: list[Peer] = []
        self.listener = Listener(secret, self._serve, log.debug, host, "train.sync.host", None, job.comm.encrypt)
        self.address = f"{host}:{self.listener.address[1]}"

    def close(self) -> None:
        self.listener.close()

    def _serve(self, channel: Channel) -> None:
        hello, _ = channel.receive(HELLO_TIMEOUT_S)
        link = TensorChannel(channel)
        peer = Peer(str(hello["name"]), str(hello["role"]), link, hello)
        self.peers.append(peer)
        try:
            self.coordinator.joined(peer)
            link.send({"ok": True})
            while True:
                link.send(*self.coordinator.handle(peer, *link.receive()))
        except WireError as error:
            self.log.debug("%s: %s", peer.name, error)
        except Exception as error:  # a bad request ends the connection, not the run
            self.log.warning("%s", f"{peer.name} is disconnected: {type(error).__name__}: {error}")
            self.log.debug("", exc_info=error)
        finally:
            self.peers.remove(peer)
            link.close()
            self.coordinator.left(peer)
