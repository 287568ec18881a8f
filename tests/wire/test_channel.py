"""Authenticated messages against unauthenticated, forged and replayed connections, over real sockets."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.command import DEADLINE_S, until

from weft.job.errors import MachineError
from weft.wire import channel as wire
from weft.wire.channel import MAGIC, MAX_MESSAGE_BYTES, Channel, Disconnected, ProtocolError, open_channel
from weft.wire.listener import MAX_PENDING, Listener
from weft.wire.secret import run_secret

SECRET = b"0123456789abcdef0123456789abcdef"


class Echo:
    """A listener that echoes every message and keeps its notes."""

    def __init__(self) -> None:
        self.heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self.notes: list[str] = []
        self.listener = Listener(SECRET, self.serve, self.notes.append)

    def serve(self, channel: Channel) -> None:
        while True:
            message, blob = channel.receive(DEADLINE_S, blob_limit=1 << 22)
            self.heard.put(message)
            channel.send(message, blob)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.listener.close()


def _raw(echo: Echo) -> socket.socket:
    sock = socket.create_connection(echo.listener.address, timeout=DEADLINE_S)
    sock.settimeout(DEADLINE_S)
    return sock


def _dropped(sock: socket.socket) -> bool:
    """Whether the other side closed the connection."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_messages_and_blobs_round_trip(echo: Echo) -> None:
    assert echo.listener.address[0] == "127.0.0.1"
    channel = open_channel(echo.listener.address, SECRET)
    blob = os.urandom(3_000_001)
    for number in range(3):
        channel.send({"n": number, "text": "ü"}, blob if number == 1 else b"")
        assert channel.receive(DEADLINE_S, 1 << 22) == ({"n": number, "text": "ü"}, blob if number == 1 else b"")
    with pytest.raises(ValueError, match="exceeds the limit"):
        channel.send({"text": "x" * MAX_MESSAGE_BYTES})
    channel.close()


def test_unauthenticated_connections_are_dropped(echo: Echo) -> None:
    good = open_channel(echo.listener.address, SECRET)
    for garbage in (b"\x00" * 200, b"GET / HTTP/1.1\r\n\r\n" * 9, MAGIC + os.urandom(64), b"\x80\x04" + b"c" * 100):
        for _ in range(3):
            sock = _raw(echo)
            sock.sendall(garbage)
            assert _dropped(sock)
    with pytest.raises((ProtocolError, Disconnected)):
        open_channel(echo.listener.address, b"another secret of the same kind!")
    good.send({"still": "here"})
    assert good.receive(DEADLINE_S)[0] == {"still": "here"}
    until(lambda: len(echo.notes) > 0)
    assert len(echo.notes) == len(set(echo.notes)) < 5
    assert echo.heard.qsize() == 1


def test_listener_without_secret_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def pretend() -> None:
            sock, _ = fake.accept()
            sock.sendall(MAGIC + os.urandom(32))
            sock.recv(4096)
            sock.sendall(os.urandom(32))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ProtocolError, match="does not have the secret"):
            open_channel(fake.getsockname(), SECRET)


class Tapped(socket.socket):
    """A socket that records what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, fileno=sock.detach())
        self.output = bytearray()

    def sendall(self, data: Any, *flags: int) -> None:
        self.output += bytes(data)
        super().sendall(data, *flags)


def test_replayed_message_is_refused(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *args, **kw: Tapped(plain(*args, **kw)))
    channel = open_channel(echo.listener.address, SECRET)
    tapped = channel._sock
    assert isinstance(tapped, Tapped)
    handshake, tapped.output = bytes(tapped.output), bytearray()
    channel.send({"op": "go"})
    frame = bytes(tapped.output)
    assert echo.heard.get(timeout=DEADLINE_S) == {"op": "go"}
    socket.socket.sendall(tapped, frame)  # the same frame again, in the same connection
    assert channel.receive(DEADLINE_S)[0] == {"op": "go"}
    with pytest.raises(Disconnected):
        channel.receive(DEADLINE_S)
    monkeypatch.undo()
    sock = _raw(echo)
    sock.sendall(handshake + frame)  # the whole conversation again, in another
    assert _dropped(sock)
    assert echo.heard.empty()


@pytest.mark.parametrize("kind", ["changed", "huge", "text", "list", "deep", "blob"])
def test_invalid_peer_loses_only_its_connection(echo: Echo, kind: str) -> None:
    other, channel = open_channel(echo.listener.address, SECRET), open_channel(echo.listener.address, SECRET)
    bodies = {
        "text": b"{",
        "list": b"[]",
        "deep": b"[" * 200_000,
        "blob": b'{"blob":{"bytes":99999999999,"sha256":""}}',
    }
    body = bodies.get(kind, b'{"op":"go"}')
    length = struct.pack("!I", MAX_MESSAGE_BYTES + 1 if kind == "huge" else len(body))
    signature = wire._sign(channel._out_key, 1 if kind == "changed" else 0, body)
    channel._sock.sendall(length + signature + body)
    with pytest.raises(Disconnected):
        channel.receive(DEADLINE_S)
    other.send({"still": "here"})
    assert other.receive(DEADLINE_S)[0] == {"still": "here"}
    assert echo.heard.qsize() == 1


def test_slow_handshakes_do_not_block(echo: Echo) -> None:
    slow = [_raw(echo) for _ in range(MAX_PENDING + 20)]
    for sock in slow:
        sock.sendall(MAGIC[:3])
    channel = open_channel(echo.listener.address, SECRET)
    channel.send({"here": 1})
    assert channel.receive(DEADLINE_S)[0] == {"here": 1}
    assert all(_dropped(sock) for sock in slow)  # the handshake's deadline ends them all


def test_secret_is_created_once_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SECRET", raising=False)
    first = run_secret(tmp_path)
    assert len(first) == 64
    assert run_secret(tmp_path) == first
    assert (tmp_path / ".secret").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == [".secret"]
    (tmp_path / ".secret").chmod(0o644)
    with pytest.raises(MachineError, match="must be a regular file that only you can read"):
        run_secret(tmp_path)
    (tmp_path / ".secret").chmod(0o600)
    (tmp_path / ".secret").write_bytes(b"")
    with pytest.raises(MachineError, match="holds 0 bytes, fewer than 32; delete the file"):
        run_secret(tmp_path)
    monkeypatch.setenv("WEFT_SECRET", "short")
    with pytest.raises(MachineError, match="WEFT_SECRET has 5 characters; at least 32 are needed"):
        run_secret(tmp_path)
    monkeypatch.setenv("WEFT_SECRET", "x" * 40)
    assert run_secret(tmp_path) == b"x" * 40
