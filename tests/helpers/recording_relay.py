"""A relay in front of a listener that records all bytes, in both directions."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def recording_relay(target: tuple[str, int]) -> Iterator[tuple[tuple[str, int], bytearray]]:
    """An address at which one connection to `target` is relayed, and what was sent; complete after the block."""
    seen = bytearray()

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a side has closed
            while part := source.recv(1 << 16):
                seen.extend(part)
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with relay.accept()[0] as near, socket.create_connection(target) as far:
            back = threading.Thread(target=copy, args=(far, near))
            back.start()
            copy(near, far)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as relay:
        between = threading.Thread(target=serve)
        between.start()
        yield relay.getsockname()[:2], seen
        between.join()
