"""The rendezvous store of one attempt on several nodes: served by a supervisor, reached only with the run's secret.

torch's TCPStore answers any client that can connect. This store uses Weft's signed messages and belongs to one attempt;
ranks of older attempts are refused.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from weft.wire.channel import Channel, Disconnected, Message, open_channel

WAIT_SLICE_S = 0.2
"""Length of one server-side wait; between two of them the rank's other threads can run."""


class AuthenticatedStore(dist.Store):
    """The client: implements torch's Store interface with requests to a StoreServer."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        attempt: int,
        timeout_s: float = 300.0,
        fence: Callable[[], None] = lambda: None,
        encrypt: bool = False,
    ):
        """`fence` raises when the attempt is over, which ends a wait. encrypt: as the supervisor's listener."""
        super().__init__()
        self._address, self._secret, self._attempt = address, secret, attempt
        self._timeout_s, self._fence, self._encrypt = timeout_s, fence, encrypt
        self._lock = threading.Lock()
        self._channel: Channel | None = None

    def _ask(self, blob: bytes = b"", **message: Any) -> tuple[Message, bytes]:
        with self._lock:
            if self._channel is None:
                self._channel = open_channel(self._address, self._secret, encrypt=self._encrypt)
                self._channel.send({"purpose": "store", "attempt": self._attempt})
            try:
                self._channel.send(message, blob)
                answer, value = self._channel.receive(30.0, blob_limit=1 << 26)
            except BaseException:
                self._channel.close()
                self._channel = None
                raise
        if why := answer.get("refused"):
            raise Disconnected(str(why))
        return answer, bytes(value)

    def set(self, key: str, value: Any) -> None:
        self._ask(_bytes(value), op="set", key=key)

    def get(self, key: str) -> bytes:
        self._wait([key], self._timeout_s)
        return self._ask(op="get", key=key)[1]

    def add(self, key: str, value: int) -> int:
        return int(self._ask(op="add", key=key, value=int(value))[0]["value"])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask(_bytes(desired), op="compare_set", key=key, expected=_bytes(expected).hex())[1]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(op="check", keys=list(keys), within_s=0.0)[0]["there"])

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._wait(list(keys), self._timeout_s if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(op="delete", key=key)[0]["there"])

    def num_keys(self) -> int:
        return int(self._ask(op="count")[0]["value"])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._timeout_s)

    def _wait(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._ask(op="check", keys=keys, within_s=WAIT_SLICE_S)[0]["there"]:
            self._fence()
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"timed out after {seconds:g} s waiting for {', '.join(keys)} in the store")


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
