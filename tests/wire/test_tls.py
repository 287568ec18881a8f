"""Encrypted messages: nothing readable on the network, and only processes with the run's secret."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command import DEADLINE_S
from helpers.recording_relay import recording_relay

from weft.job import apply_overrides, parse_job
from weft.job.errors import JobError, MachineError
from weft.launch.node import start_node
from weft.planner import check, make_plan
from weft.supervisor.nodes.node_address import NodeAddress
from weft.wire import channel as wire
from weft.wire import tls
from weft.wire.channel import Channel, WireError, open_channel
from weft.wire.listener import Listener

SECRET = b"0123456789abcdef0123456789abcdef"
TEXT = "weights that must not be readable"


def echo(channel: Channel) -> None:
    while True:
        channel.send(*channel.receive(DEADLINE_S, blob_limit=1 << 22))


@pytest.fixture
def encrypted() -> Iterator[Listener]:
    made = Listener(SECRET, echo, lambda text: None, encrypt=True)
    yield made
    made.close()


def recorded(target: tuple[str, int], encrypt: bool) -> bytes:
    """All bytes of a connection to a listener, in both directions, recorded by a relay."""
    with recording_relay(target) as (address, seen):
        channel = open_channel(address, SECRET, encrypt=encrypt)
        blob = TEXT.encode() * 50_000
        channel.send({"text": TEXT}, blob)
        assert channel.receive(DEADLINE_S, 1 << 22) == ({"text": TEXT}, blob)
        channel.close()
    return bytes(seen)


def test_encrypted_messages_cannot_be_read(encrypted: Listener) -> None:
    seen = recorded(encrypted.address, encrypt=True)
    assert len(seen) > 100_000 and TEXT.encode() not in seen and b"weft" not in seen
    plain = Listener(SECRET, echo, lambda text: None)
    assert TEXT.encode() in recorded(plain.address, encrypt=False)
    plain.close()


def test_encrypted_listener_needs_the_secret(encrypted: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError):
        open_channel(encrypted.address, os.urandom(32), encrypt=True)
    with monkeypatch.context() as short:
        short.setattr(wire, "HANDSHAKE_S", 0.5)
        with pytest.raises(WireError):  # a client without TLS
            open_channel(encrypted.address, SECRET)
    assert open_channel(encrypted.address, SECRET, encrypt=True).peer == "127.0.0.1"


def test_one_certificate_a_run() -> None:
    """Every process derives the same certificate from the secret, and no other run has it."""
    assert tls._certificate(SECRET) == tls._certificate(SECRET)
    assert tls._certificate(SECRET) != tls._certificate(SECRET[::-1])
    for server in (True, False):
        context = tls.tls_context(SECRET, server)
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3  # which has forward secrecy
        assert context.verify_mode == ssl.CERT_REQUIRED


def test_encryption_that_is_not_possible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"name": "x", "model": {"shape": "tiny"}, "cluster": {"device": "h100-sxm", "nodes": 2}}
    with pytest.raises(JobError, match=r"nccl, which cannot encrypt; comm\.backend=gloo, .*WireGuard.* would work"):
        check(*make_plan(parse_job(apply_overrides(raw, ["comm.encrypt=true"]))))
    alone = parse_job(apply_overrides(raw, ["comm.encrypt=true", "cluster.nodes=1", "cluster.device=cpu"]))
    check(*make_plan(alone, 2))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    check(*make_plan(alone, 2))
    monkeypatch.setattr(tls.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MachineError, match=r"comm.encrypt needs the package cryptography: pip install 'weft\[encrypt\]'"
    ):
        tls.check_tls_package()


def test_node_without_the_package_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tls.importlib.util.find_spec
    monkeypatch.setattr(tls.importlib.util, "find_spec", lambda name: None if name == "cryptography" else found(name))
    job = parse_job(
        {"model": "tiny", "comm": {"encrypt": True}, "cluster": {"device": "cpu"}, "runs_dir": str(tmp_path)}
    )
    with pytest.raises(MachineError, match=r"pip install 'weft\[encrypt\]'"):
        start_node(job, NodeAddress(0, 2, "127.0.0.1"), 1)
    assert not any(tmp_path.iterdir())
