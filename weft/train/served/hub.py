"""Who is connected to the chief: a thread for each, that passes what it asks to the desk and the answer back."""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from weft.sync.wire import Link, Message, WireError


@dataclass(eq=False)
class Peer:
    """A process that connected."""

    name: str
    role: str
    link: Link
    about: dict[str, Any] = field(default_factory=dict)
    """What it said of itself."""


class Desk(Protocol):
    """What answers. Its methods are called from many threads, and may wait."""

    def arrived(self, peer: Peer) -> None: ...

    def answer(self, peer: Peer, head: dict[str, Any], tensors: dict[str, Tensor]) -> Message: ...

    def gone(self, peer: Peer) -> None: ...


class Hub:
    """Listens, and serves every peer that knows the secret until it goes away."""

    def __init__(self, host: str, secret: bytes, desk: Desk, log: logging.Logger):
        self.secret, self.desk, self.log = secret, desk, log
        self.socket = socket.create_server((host, 0))
        self.address = f"{host}:{self.socket.getsockname()[1]}"
        self.closed = False
        self.peers: list[Peer] = []
        threading.Thread(target=self._listen, daemon=True, name="hub").start()

    def close(self) -> None:
        self.closed = True
        self.socket.close()
        for peer in list(self.peers):
            peer.link.close()

    def _listen(self) -> None:
        while not self.closed:
            try:
                sock, _ = self.socket.accept()
            except OSError:
                time.sleep(0.05)  # closed, or out of handles for a while
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            link = Link(sock, self.secret, asks=False)
            head, _ = link.receive()
            peer = Peer(str(head["name"]), str(head["role"]), link, head)
        except (WireError, KeyError, ValueError, TypeError) as error:
            self.log.debug("a stranger was turned away: %s", error)
            sock.close()
            return
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
