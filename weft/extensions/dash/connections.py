"""Limits of the dashboard's connections: time for the headers of a request, and connections of one address."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 10.0
"""Time from the first byte of a request, or from the start of a connection, to the end of the headers."""
MAX_PER_ADDRESS = 64
"""Browsers open six, and one for each stream of events."""


def limited_protocol(header_s: float = HEADER_S, per_address: int = MAX_PER_ADDRESS) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with these limits. Headers have at most 64 KiB."""
    connections = Counter[str]()

    class LimitedProtocol(H11Protocol):
        _address = ""
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._address = self.client[0] if self.client else ""
            connections[self._address] += 1
            if connections[self._address] > per_address:
                transport.abort()
            else:
                self._limit_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._limit_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            connections[self._address] -= 1
            if connections[self._address] <= 0:
                del connections[self._address]
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

        def _limit_headers(self) -> None:
            """Start the time limit of a request that has not come whole; end that of one that is being answered."""
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering and self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            elif not answering and self._deadline is None:
                self._deadline = self.loop.call_later(header_s, self._close_unless_answering)

        def _close_unless_answering(self) -> None:
            self._deadline = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

    return LimitedProtocol
