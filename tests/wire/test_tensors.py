"""Messages with tensors round-trip; unauthenticated peers are refused."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from helpers.command import DEADLINE_S

from weft.wire.channel import Channel, WireError
from weft.wire.listener import Listener
from weft.wire.tensors import ALIGNMENT, SIZE, TensorChannel, open_tensor_channel

SECRET = b"s" * 32


@contextmanager
def listening(handle: Callable[[TensorChannel], None]) -> Iterator[tuple[str, queue.Queue[str]]]:
    """A listener that handles every connection, and a queue of their errors."""
    result: queue.Queue[str] = queue.Queue()

    def serve(channel: Channel) -> None:
        try:
            handle(TensorChannel(channel))
        except WireError as error:
            result.put(str(error))

    listener = Listener(SECRET, serve, lambda text: None)
    yield f"127.0.0.1:{listener.address[1]}", result
    listener.close()


def echo(link: TensorChannel) -> None:
    while True:
        link.send(*link.receive())


def test_tensors_round_trip() -> None:
    sent = {
        "w": torch.randn(3, 5).t(),
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(7, dtype=torch.int64),
        "nan": torch.tensor([float("nan")], dtype=torch.float64),
        "many parts": torch.randn(700_000),
    }
    with listening(echo) as (address, _):
        link = open_tensor_channel(address, SECRET)
        for _ in range(2):
            head, got = link.request({"kind": "push", "loss": float("inf")}, sent)
            assert head == {"kind": "push", "loss": float("inf")}
            assert got.keys() == sent.keys()
            assert all(got[n].dtype == sent[n].dtype and got[n].shape == sent[n].shape for n in sent)
            assert all(torch.equal(got[n], sent[n]) for n in sent if n != "nan") and bool(got["nan"].isnan())
        assert link.request({"kind": "pull"}) == ({"kind": "pull"}, {})
        assert link.sent > 5_600_000 and link.received > 5_600_000
        link.close()


def test_tensor_channel_needs_the_secret() -> None:
    heard: list[object] = []
    with listening(lambda link: heard.append(link.receive())) as (address, _):
        with pytest.raises(WireError):
            open_tensor_channel(address, b"t" * 32)
        with pytest.raises(WireError):
            open_tensor_channel("127.0.0.1:1", SECRET)
    assert not heard


def pass_on(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(change(data))
        sink.shutdown(socket.SHUT_WR)


def sit_between(server: socket.socket, to: tuple[str, int], change: Callable[[bytes], bytes]) -> None:
    """Forward a connection and change the bytes of the client."""
    client, _ = server.accept()
    with client, socket.create_connection(to) as out:
        answers = threading.Thread(target=pass_on, args=(out, client, lambda data: data), daemon=True)
        answers.start()
        pass_on(client, out, change)
        answers.join(DEADLINE_S)


@pytest.mark.parametrize("what", ["message", "tensor"])
def test_changed_message_is_refused(what: str) -> None:
    """Messages of a peer with the right secret are changed on the way."""
    sent, other = torch.tensor([1.5, 2.5]), torch.tensor([1.5, 99.0])
    before, after, why = {
        "message": (b"push", b"pull", "a message with a wrong signature"),
        "tensor": (sent.numpy().tobytes(), other.numpy().tobytes(), "bytes with a wrong checksum"),
    }[what]
    with listening(echo) as (address, result), socket.create_server(("127.0.0.1", 0)) as between:
        to = ("127.0.0.1", int(address.rpartition(":")[2]))
        args = (between, to, lambda data: data.replace(before, after))
        threading.Thread(target=sit_between, args=args, daemon=True).start()
        link = open_tensor_channel(f"127.0.0.1:{between.getsockname()[1]}", SECRET)
        link.send({"kind": "push"}, {"w": sent})
        assert result.get(timeout=DEADLINE_S) == why
        link.close()


LIES = {
    "a list": (b'{"w": 1}', "an invalid list of tensors"),
    "a word": (b'["w"]   ', "an invalid list of tensors"),
    "a kind": (b'[["w", "object", [1]]]', "w has the invalid type object"),
    "a shape": (b'[["w", "float32", [-1]]]', "w has the invalid type float32"),
    "a size": (b'[["w", "float32", [99999999]]]', "the message ends before"),
}


@pytest.mark.parametrize("lie", LIES)
def test_invalid_tensor_list_is_refused(lie: str) -> None:
    text, why = LIES[lie]
    with listening(echo) as (address, result):
        link = open_tensor_channel(address, SECRET)
        text += b" " * (-len(text) % ALIGNMENT)
        link.channel.send({}, [SIZE.pack(len(text)) + text, bytes(8)])
        assert why in result.get(timeout=DEADLINE_S)
        link.close()


def test_blob_limit() -> None:
    with listening(echo) as (address, result):
        link = open_tensor_channel(address, SECRET)
        link.channel.send({"blob": {"bytes": 1 << 50, "sha256": ""}})
        assert "bytes that were not requested" in result.get(timeout=DEADLINE_S)
        link.close()
