"""Who is connected to the chief: a thread for each, that passes what it asks to the desk and the answer back."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from weft.wire.channel import Channel, WireError
from weft.wire.listener import Listener
from weft.wire.tensors import Answer, TensorChannel

HELLO_S = 60.0
"""Whoever has shown the secret says within this time who he is."""


@dataclass(eq=False)
class Peer:
    """A process that connected."""

    name: str
    role: str
    link: TensorChannel
    about: dict[str, Any] = field(default_factory=dict)
    """What it said of itself."""


class Desk(Protocol):
    """What answers. Its methods are called from many threads, and may wait."""

    def arrived(self, peer: Peer) -> None: ...

    def answer(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> Answer: ...

    def gone(self, peer: Peer) -> None: ...


class Hub:
    """Listens, and serves every peer that knows the secret until it goes away."""

    def __init__(self, host: str, secret: bytes, desk: Desk, log: logging.Logger):
        self.desk, self.log = desk, log
        self.peers: list[Peer] = []
        self.listener = Listener(secret, self._serve, log.debug, host, "train.sync.host", ack_timeout_s=None)
        self.address = f"{host}:{self.listener.address[1]}"

    def close(self) -> None:
        self.listener.close()

    def _serve(self, channel: Channel) -> None:
        hello, _ = channel.receive(HELLO_S)
        link = TensorChannel(channel)
        peer = Peer(str(hello["name"]), str(hello["role"]), link, hello)
        self.peers.append(peer)
        try:
            self.desk.arrived(peer)
            link.send({"ok": True})
            while True:
                link.send(*self.desk.answer(peer, *link.receive()))
        except WireError as error:
            self.log.debug("%s: %s", peer.name, error)
        except Exception as error:  # what one peer sends must not end the run of the others
            self.log.warning("%s", f"{peer.name} is sent away: {type(error).__name__}: {error}")
            self.log.debug("", exc_info=error)
        finally:
            self.peers.remove(peer)
            link.close()
            self.desk.gone(peer)
