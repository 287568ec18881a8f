"""The TLS tunnel: bytes arrive unchanged in both directions, unreadable on the way, from processes of the run only."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command import DEADLINE_S
from helpers.recording_relay import recording_relay

from weft.job import parse_job
from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir
from weft.wire.tls import tls_context
from weft.wire.tunnel import Tunnel, open_tunnel

SECRET, HERE, THERE = b"0123456789abcdef" * 2, "127.0.0.5", "127.0.0.6"
TEXT = b"gradients that must not be readable " * 100_000


@pytest.fixture
def ends() -> Iterator[tuple[Tunnel, Tunnel]]:
    made = Tunnel(SECRET, HERE), Tunnel(SECRET, THERE)
    yield made
    for tunnel in made:
        tunnel.close()
    assert "tls-tunnel" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as made:
        made.settimeout(DEADLINE_S)
        yield made


def connected(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=DEADLINE_S)


def at_end(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def read(sock: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (part := sock.recv(1 << 20)):
        found += part
    return bytes(found)


def test_both_directions(ends: tuple[Tunnel, Tunnel], listener: socket.socket) -> None:
    exposed = ends[0].expose(listener.getsockname())
    assert exposed[0] == HERE
    near = ends[1].reach(exposed, "127.0.0.3")
    assert near[0] == "127.0.0.3"
    with connected(near) as client, listener.accept()[0] as server:
        server.settimeout(DEADLINE_S)
        for source, sink in ((client, server), (server, client)):
            sender = threading.Thread(target=source.sendall, args=(TEXT,))
            sender.start()
            assert read(sink, len(TEXT)) == TEXT
            sender.join()
        client.close()
        assert at_end(server)  # the other side learns of it
    with connected(near) as client:
        listener.accept()[0].close()
        assert at_end(client)


def test_close_sends_what_was_written(ends: tuple[Tunnel, Tunnel], listener: socket.socket) -> None:
    near = ends[1].reach(ends[0].expose(listener.getsockname()), "127.0.0.3")
    with connected(near) as client, listener.accept()[0] as server:
        server.settimeout(DEADLINE_S)
        client.sendall(TEXT[:100_000])
        closing = [threading.Thread(target=tunnel.close) for tunnel in (ends[1], ends[0])]
        closing[0].start()
        assert read(server, 100_000) == TEXT[:100_000]
        closing[1].start()
        for thread in closing:
            thread.join()
        assert at_end(client) and at_end(server)


def test_nothing_can_be_read_on_the_way(ends: tuple[Tunnel, Tunnel], listener: socket.socket) -> None:
    with (
        recording_relay(ends[0].expose(listener.getsockname())) as (address, seen),
        connected(ends[1].reach(address, "127.0.0.3")) as client,
        listener.accept()[0] as server,
    ):
        server.settimeout(DEADLINE_S)
        sender = threading.Thread(target=client.sendall, args=(TEXT,))
        sender.start()
        assert read(server, len(TEXT)) == TEXT
        sender.join()
    assert len(seen) > len(TEXT)
    assert b"readable" not in seen


def test_others_are_not_forwarded(ends: tuple[Tunnel, Tunnel], listener: socket.socket) -> None:
    """Processes without the run's certificate, or without TLS, do not reach a listener."""
    exposed = ends[0].expose(listener.getsockname())
    stranger = Tunnel(SECRET[::-1], THERE)
    try:
        with connected(stranger.reach(exposed, "127.0.0.1")) as client:
            assert at_end(client)
    finally:
        stranger.close()
    with contextlib.suppress(ConnectionResetError), connected(exposed) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in read(client, 1 << 16)
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError), anonymous.wrap_socket(connected(exposed)) as client:  # refused, or closed
        client.sendall(b"text")
        assert client.recv(1) == b""
    listener.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert tls_context(SECRET, server=True).verify_mode == ssl.CERT_REQUIRED


def test_only_ranks_of_several_hosts_need_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = parse_job({"model": "tiny", "comm": {"encrypt": True}, "resilience": {"bind": THERE}})
    monkeypatch.setenv("WEFT_SECRET", SECRET.decode())
    for local, wanted in (("2", None), ("1", THERE)):
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local}.items():
            monkeypatch.setenv(name, value)
        tunnel = open_tunnel(job, RunDir(tmp_path))
        assert (tunnel and tunnel.host) == wanted
        if tunnel is not None:
            tunnel.close()
    tunnel = Tunnel(SECRET, "192.0.2.1")
    with pytest.raises(MachineError, match=r"comm\.encrypt: cannot listen at 192\.0\.2\.1"):
        tunnel.expose(("127.0.0.1", 1))
    tunnel.close()
