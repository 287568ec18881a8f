"""The rendezvous store listens at MASTER_ADDR only, and ranks of one machine at loopback only."""

from __future__ import annotations

import datetime
import socket

import psutil
import pytest

from weft.comm.tcp_store import tcp_store
from weft.hardware.network import GLOO, own_address, use_loopback
from weft.job.errors import MachineError

TIMEOUT = datetime.timedelta(seconds=20)


def test_store_listens_at_its_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = tcp_store("127.0.0.1", 0, is_master=True, timeout=TIMEOUT)
    store.set("key", "value")
    assert tcp_store("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT).get("key") == b"value"
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [a.ip for a in listening if a.port == store.port] == ["127.0.0.1"]
    with pytest.raises(MachineError, match=r"rank 0 cannot listen at MASTER_ADDR=127\.0\.0\.1"):
        tcp_store("127.0.0.1", store.port, is_master=True, timeout=TIMEOUT)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "name"])
def test_ranks_that_look_like_several_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback address is used as such; a host name that means loopback is replaced by the network's address."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda at, *a, **k: found("127.0.1.1" if at == "name" else at, *a, **k))
    store = tcp_store(host, 0, is_master=True, timeout=TIMEOUT)
    store.set("key", "value")
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    (at,) = [a.ip for a in listening if a.port == store.port]
    assert at == own_address() if host == "name" else at in ("127.0.0.1", "::1")


def test_local_ranks_use_loopback() -> None:
    environ: dict[str, str] = {}
    use_loopback(environ)
    assert environ[GLOO] in {name for _, name in socket.if_nameindex()}
    assert psutil.net_if_addrs()[environ[GLOO]][0].address == "127.0.0.1"
