"""The server side of the ranks' rendezvous store: key-value pairs of the newest attempt."""

from __future__ import annotations

import threading
from typing import Any

from weft.wire.channel import Channel, Message

MAX_STORE_BYTES = 1 << 26
"""Limit of all values of an attempt together; torch stores addresses and small objects."""
IDLE_S = 24 * 3600.0


class StoreServer:
    """The store of the newest attempt; ranks of older attempts are refused."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._attempt = 0
        self._values: dict[str, bytes] = {}

    def open(self, attempt: int) -> None:
        """Start an attempt with an empty store."""
        with self._changed:
            if attempt > self._attempt:
                self._attempt, self._values = attempt, {}
            self._changed.notify_all()

    def serve(self, channel: Channel, hello: Message) -> None:
        """Answer one rank until it disconnects."""
        attempt = int(hello["attempt"])
        while True:
            message, blob = channel.receive(IDLE_S, blob_limit=MAX_STORE_BYTES)
            with self._changed:
                # a rank may learn of an attempt before the supervisor that serves its store
                self._changed.wait_for(lambda: self._attempt >= attempt, timeout=5.0)
                if self._attempt != attempt:
                    answer, value = {"refused": f"attempt {attempt} is over; this is attempt {self._attempt}"}, b""
                else:
                    answer, value = self._answer(message, bytes(blob))
            channel.send(answer, value)

    def _answer(self, message: Message, blob: bytes) -> tuple[dict[str, Any], bytes]:
        values, op = self._values, str(message["op"])
        if op == "check":
            keys = [str(key) for key in message["keys"]]
            attempt = self._attempt
            self._changed.wait_for(
                lambda: self._attempt != attempt or all(k in self._values for k in keys),
                timeout=min(1.0, float(message["within_s"])),
            )
            return {"there": all(k in self._values for k in keys)}, b""
        if op == "count":
            return {"value": len(values)}, b""
        key = str(message["key"])
        if op == "get":
            return {}, values.get(key, b"")
        if op == "delete":
            return {"there": values.pop(key, None) is not None}, b""
        if op == "add":
            total = int(values.get(key, b"0")) + int(message["value"])
            self._put(key, str(total).encode())
            return {"value": total}, b""
        if op == "compare_set":
            expected, before = bytes.fromhex(str(message["expected"])), values.get(key)
            if before == expected or (before is None and not expected):
                self._put(key, blob)
                return {}, blob
            return {}, expected if before is None else before
        if op == "set":
            self._put(key, blob)
            return {}, b""
        raise ValueError(f"no store does {op!r}")

    def _put(self, key: str, value: bytes) -> None:
        if sum(map(len, self._values.values())) + len(value) > MAX_STORE_BYTES:
            raise ValueError("the store is full")
        self._values[key] = value
        self._changed.notify_all()
