"""A TLS tunnel between hosts, for traffic that cannot encrypt itself.

Every process exposes its local listeners at its own address, with the certificate of the run (weft.wire.tls), and
reaches those of other processes through listeners on its loopback interface.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from weft.hardware.network import choose, own_address
from weft.hardware.rank_environment import rank_info
from weft.job.errors import MachineError
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.wire.secret import run_secret
from weft.wire.tls import check_tls_package, tls_context

CHUNK = 1 << 20
TIMEOUT_S = 10.0
"""Limit of a connection's TCP and TLS handshakes."""

Address = tuple[str, int]


class Tunnel:
    """Forwards connections in a thread of its own until it is closed."""

    def __init__(self, secret: bytes, host: str):
        """host: the address at which other hosts reach this one. `fingerprint` is equal where the secret is."""
        check_tls_package()
        self.host, self.fingerprint = host, hmac.digest(secret, b"weft tunnel", "sha256").hex()[:16]
        self._client, self._server = tls_context(secret, server=False), tls_context(secret, server=True)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tls-tunnel")
        self._thread.start()

    def expose(self, local: Address) -> Address:
        """Forward what other processes of the run send to the returned address."""
        return self._call(self._listen(self.host, local, arriving=self._server, leaving=None))

    def reach(self, remote: Address, through: str) -> Address:
        """Forward what is sent to the returned address, on the loopback address `through`, to an exposed one."""
        return self._call(self._listen(through, remote, arriving=None, leaving=self._client))

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which cancels what is open at the end
            runner.run(self._wait_for_close())

    async def _wait_for_close(self) -> None:
        await self._closing.wait()

    def _call(self, work: Coroutine[Any, Any, Address]) -> Address:
        future: concurrent.futures.Future[Address] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(TIMEOUT_S)

    async def _listen(
        self, host: str, target: Address, arriving: ssl.SSLContext | None, leaving: ssl.SSLContext | None
    ) -> Address:
        async def connected(near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):  # by close()
                await _forward(near, to_near, lambda: asyncio.open_connection(*target, ssl=leaving, limit=CHUNK))

        timeout = TIMEOUT_S if arriving else None
        try:
            server = await asyncio.start_server(
                connected, host, 0, ssl=arriving, limit=CHUNK, backlog=2048, ssl_handshake_timeout=timeout
            )
        except OSError as error:
            raise MachineError(f"comm.encrypt: cannot listen at {host}: {error}") from error
        address: Address = server.sockets[0].getsockname()[:2]
        return address


def open_tunnel(job: Job, run: RunDir) -> Tunnel | None:
    """The tunnel of this rank, if the job has comm.encrypt and there are ranks on other hosts."""
    here = rank_info()
    if not job.comm.encrypt or here.local_world == here.world:
        return None
    return Tunnel(run_secret(run.path), job.resilience.bind or choose().address or own_address())


async def _forward(
    near: asyncio.StreamReader, to_near: asyncio.StreamWriter,
    connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
) -> None:  # fmt: skip
    """Copy both directions until one side closes; then close the other one."""
    writers = [to_near]
    try:
        far, to_far = await asyncio.wait_for(connect(), TIMEOUT_S)
        writers.append(to_far)
        copies = [asyncio.ensure_future(_copy(near, to_far)), asyncio.ensure_future(_copy(far, to_near))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
    except OSError:
        pass  # both sides see a closed connection
    finally:
        for writer in writers:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(CHUNK):
            writer.write(part)
            await writer.drain()
