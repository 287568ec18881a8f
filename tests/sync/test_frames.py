"""Messages between servers and workers: whole tensors, and nothing from who does not know the secret."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft.sync.secret import make_secret
from weft.sync.wire import SIZES, Link, WireError, connect

SECRET = b"s" * 32


def answer(with_secret: bytes, handle: Callable[[Link], None]) -> tuple[str, threading.Thread]:
    """A listener in a thread that takes one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        sock, _ = listener.accept()
        listener.close()
        handle(Link(sock, with_secret, asks=False))
        sock.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


def test_tensors_travel_as_they_are() -> None:
    sent = {
        "w": torch.randn(3, 5).t(),
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(7, dtype=torch.int64),
        "nan": torch.tensor([float("nan")], dtype=torch.float64),
    }

    def echo(link: Link) -> None:
        for _ in range(2):
            link.send(*link.receive())

    address, thread = answer(SECRET, echo)
    link = connect(address, SECRET)
    for _ in range(2):
        head, got = link.request({"kind": "push", "loss": float("inf")}, sent)
        assert head == {"kind": "push", "loss": float("inf")}
        assert got.keys() == sent.keys()
        assert all(got[n].dtype == sent[n].dtype and got[n].shape == sent[n].shape for n in sent)
        assert all(torch.equal(got[n], sent[n]) for n in sent if n != "nan") and bool(got["nan"].isnan())
    assert link.sent > 0 and link.received > 0
    thread.join(30)


def refused(handle: Callable[[Link], None], ask: Callable[[str], None]) -> str:
    """What the listener's side says to a peer."""
    said: list[str] = []

    def listen(link: Link) -> None:
        with pytest.raises(WireError) as error:
            handle(link)
        said.append(str(error.value))

    address, thread = answer(SECRET, listen)
    ask(address)
    thread.join(30)
    return said[0]


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    def stranger(address: str) -> None:
        connect(address, b"t" * 32).send({"kind": "push"})

    assert "not signed" in refused(lambda link: print(link.receive()), stranger)


def test_a_message_is_taken_once_and_as_it_was() -> None:
    """What is sent again, or changed on its way, is refused; the peer has the right secret, and is overheard."""

    def changed(again: bool) -> Callable[[str], None]:
        def ask(address: str) -> None:
            host, _, port = address.rpartition(":")
            ours, theirs = socket.socketpair()
            recorder = threading.Thread(target=relay, args=(theirs, (host, int(port)), again), daemon=True)
            recorder.start()
            Link(ours, SECRET, asks=True).send({"kind": "push"})
            ours.shutdown(socket.SHUT_WR)
            recorder.join(30)

        return ask

    def relay(theirs: socket.socket, to: tuple[str, int], again: bool) -> None:
        with socket.create_connection(to) as out:
            theirs.sendall(out.recv(16, socket.MSG_WAITALL))
            out.sendall(theirs.recv(16, socket.MSG_WAITALL))
            message = b"".join(iter(lambda: theirs.recv(65536), b""))
            spot = message.index(b"push")
            out.sendall(message * 2 if again else message[:spot] + b"pull" + message[spot + 4 :])

    assert "not signed" in refused(lambda link: print(link.receive()), changed(again=False))
    assert "not signed" in refused(lambda link: print(link.receive(), link.receive()), changed(again=True))


def test_a_stranger_cannot_fill_the_memory() -> None:
    def stranger(address: str) -> None:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"n" * 16 + SIZES.pack(100, 1 << 50))

    assert "too large" in refused(lambda link: print(link.receive()), stranger)


def test_only_the_owner_reads_the_secret(tmp_path: Path) -> None:
    secret = make_secret(tmp_path / ".secret")
    assert (tmp_path / ".secret").read_bytes() == secret
    assert (tmp_path / ".secret").stat().st_mode & 0o777 == 0o600
    assert make_secret(tmp_path / ".secret") != secret
