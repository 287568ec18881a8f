"""Gloo between hosts over TLS: a backend whose listeners are on loopback, and a store that connects them by a tunnel.

Gloo can encrypt only in builds of torch of one's own. Ranks find one another's listeners in the rendezvous store, so
the store is where their addresses are replaced by those of the tunnel.
"""

from __future__ import annotations

import datetime
import json
import re
import socket
import struct
from typing import Any

import torch.distributed as dist

from weft.comm.gloo_internals import ENCRYPTED, gloo_at
from weft.job.errors import MachineError
from weft.wire.tunnel import Address, Tunnel

OWN, BEFORE, AFTER = "127.0.0.2", "127.0.0.1", "127.0.0.3"
"""Loopback addresses of a rank's own listener, and of the tunnel to a rank that is before or after it. Of two
listeners, Gloo connects from the one with the higher address, and both ranks must see the same order."""
MARK = b"\0weft tunnel "
"""Precedes the address at which a tunnel exposes a listener, after Gloo's own value."""


FAMILY = struct.pack("=H", socket.AF_INET)
_LISTENER = re.compile(re.escape(FAMILY) + b"(..)" + re.escape(socket.inet_aton(OWN)) + bytes(8), re.DOTALL)
"""A struct sockaddr_in of a rank's own listener, as Gloo writes it into the store."""


def encrypted_store(store: dist.Store, tunnel: Tunnel) -> dist.Store:
    """The store for groups of the encrypted backend, which is registered with torch once per process."""
    if not hasattr(dist.Backend, ENCRYPTED.upper()):
        dist.Backend.register_backend(ENCRYPTED, _create, devices=["cpu", "cuda"])
    return TunnelStore(store, tunnel)


def _create(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return gloo_at(OWN, store, rank, size, timeout)


class TunnelStore(dist.Store):
    """A rendezvous store that adds to each listener the address at which the tunnel exposes it, and replaces the
    listeners of other ranks by those of the tunnel to them."""

    def __init__(self, inner: dist.Store, tunnel: Tunnel):
        super().__init__()
        self._inner: Any = inner
        self._tunnel = tunnel
        self._exposed: dict[str, Address] = {}
        """This rank's exposed listeners, by group (the key without its last part)."""

    def set(self, key: str, value: Any) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        if found := _LISTENER.search(value):
            address = self._tunnel.expose((OWN, int.from_bytes(found[1], "big")))
            self._exposed[_group(key)] = address
            value += MARK + json.dumps([*address, self._tunnel.fingerprint]).encode()
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value, _, text = bytes(self._inner.get(key)).partition(MARK)
        if not text:
            return value
        host, port, fingerprint = json.loads(text)
        if fingerprint != self._tunnel.fingerprint:
            raise MachineError(
                f"comm.encrypt: a rank on {host} has another secret than this one; put the run's folder on a shared "
                "disk, or set WEFT_SECRET to the same value on all nodes"
            )
        own = self._exposed[_group(key)]
        if host == own[0]:  # loopback connects the ranks of one host
            return value
        near = _socket_address(*self._tunnel.reach((host, port), BEFORE if (host, port) < own else AFTER))
        return _LISTENER.sub(lambda _: near, value)

    def add(self, key: str, value: int) -> int:
        return int(self._inner.add(key, value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._inner.compare_set(key, expected, desired))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._inner.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> datetime.timedelta:
        found: datetime.timedelta = self._inner.timeout
        return found


def _socket_address(host: str, port: int) -> bytes:
    return FAMILY + port.to_bytes(2, "big") + socket.inet_aton(host) + bytes(8)


def _group(key: str) -> str:
    return key.rpartition("/")[0]
