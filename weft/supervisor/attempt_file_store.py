"""The rendezvous store of one attempt on one machine: a FileStore whose waits end with the attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

POLL_S = 0.002


class AttemptFileStore(dist.Store):
    """A FileStore whose waits raise as soon as the attempt is over; torch's own waits for its whole timeout."""

    def __init__(self, path: str, world: int, timeout_s: float, fence: Callable[[], None]):
        super().__init__()
        self.inner, self.timeout_s, self.fence = dist.FileStore(path, world), timeout_s, fence

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        return self.inner.num_keys()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (self.timeout_s if timeout is None else timeout.total_seconds())
        while not self.inner.check(keys):
            self.fence()
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out: the other ranks did not set {', '.join(keys)}")
            time.sleep(POLL_S)
