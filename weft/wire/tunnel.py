"""A TLS tunnel between hosts, for traffic that cannot encrypt itself.

Every process exposes its local listeners at its own address, with the certificate of the run (weft.wire.tls), and
reaches those of other processes through listeners on its loopback interface.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import ssl
import threading
from collections.abc import Callable

from weft.hardware.network import choose, own_address
from weft.hardware.rank_environment import rank_info
from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.wire.channel import close_socket
from weft.wire.secret import run_secret
from weft.wire.tls import check_tls_package, tls_context

CHUNK = 1 << 18
TIMEOUT_S = 10.0
"""Limit of a connection's TCP and TLS handshakes."""
LINGER_S = 2.0
"""How long a connection that one side has closed waits for the other one."""

Address = tuple[str, int]
Join = Callable[[socket.socket], tuple[ssl.SSLSocket, socket.socket]]
"""Makes both sides of a forwarded connection, encrypted and plain, from one that was accepted."""


class Tunnel:
    """Forwards connections, each in a thread of its own, until it is closed."""

    def __init__(self, secret: bytes, host: str):
        """host: the address at which other hosts reach this one. `fingerprint` is equal where the secret is."""
        check_tls_package()
        self.host, self.fingerprint = host, hmac.digest(secret, b"weft tunnel", "sha256").hex()[:16]
        self._client, self._server = tls_context(secret, server=False), tls_context(secret, server=True)
        self._lock = threading.Lock()
        self._listeners: set[socket.socket] = set()
        self._plain: set[socket.socket] = set()
        """The side of each connection that is not encrypted."""
        self._threads: list[threading.Thread] = []
        self._closed = False

    def expose(self, local: Address) -> Address:
        """Forward what other processes of the run send to the returned address."""

        def join(arrived: socket.socket) -> tuple[ssl.SSLSocket, socket.socket]:
            return self._server.wrap_socket(arrived, server_side=True), _connect(local)

        return self._listen(self.host, join)

    def reach(self, remote: Address, through: str) -> Address:
        """Forward what is sent to the returned address, on the loopback address `through`, to an exposed one."""

        def join(arrived: socket.socket) -> tuple[ssl.SSLSocket, socket.socket]:
            return self._client.wrap_socket(_connect(remote)), arrived

        return self._listen(through, join)

    def close(self) -> None:
        """Send what local processes have written so far, close all connections and end the threads."""
        with self._lock:
            self._closed = True
            listeners, open_, threads = list(self._listeners), list(self._plain), list(self._threads)
        for sock in listeners:
            close_socket(sock)
        for sock in open_:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)  # the next read after what is there already is the end
        for thread in threads:
            thread.join(TIMEOUT_S)

    def _listen(self, host: str, join: Join) -> Address:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family, backlog=2048)
        except OSError as error:
            raise MachineError(f"comm.encrypt: cannot listen at {host}: {error}") from error
        address: Address = listener.getsockname()[:2]
        with self._lock:
            self._listeners.add(listener)
        self._start(self._accept, listener, join)
        return address

    def _start(self, work: Callable[[socket.socket, Join], None], sock: socket.socket, join: Join) -> None:
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=work, args=(sock, join), daemon=True, name="tls-tunnel")
            self._threads.append(thread)
            thread.start()

    def _accept(self, listener: socket.socket, join: Join) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = listener.accept()
                self._start(self._forward, sock, join)

    def _forward(self, arrived: socket.socket, join: Join) -> None:
        try:
            arrived.settimeout(TIMEOUT_S)
            encrypted, plain = join(arrived)
        except OSError:
            close_socket(arrived)
            return
        with self._lock:
            self._plain.add(plain)
            if self._closed:
                plain.shutdown(socket.SHUT_RD)
        try:
            forward(encrypted, plain)
        finally:
            with self._lock:
                self._plain.discard(plain)
            close_socket(encrypted)
            close_socket(plain)


def open_tunnel(job: Job, run: RunDir) -> Tunnel | None:
    """The tunnel of this rank, if the job has comm.encrypt and there are ranks on other hosts."""
    here = rank_info()
    if not job.comm.encrypt or here.local_world == here.world:
        return None
    return Tunnel(run_secret(run.path), job.resilience.bind or choose().address or own_address())


def _connect(address: Address) -> socket.socket:
    sock = socket.create_connection(address, timeout=TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def forward(encrypted: ssl.SSLSocket, plain: socket.socket) -> None:
    """Copy both directions until one side closes. A TLS connection may be used by one thread at a time only."""
    copies = [_Copy(encrypted, plain), _Copy(plain, encrypted)]
    for sock in (encrypted, plain):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        wanted: dict[int, int] = {}
        moved = False
        for copy in copies:
            try:
                moved |= copy.advance(wanted)
            except OSError:
                _finish(copy.sink)
                return
        if not moved:
            poller = select.poll()
            for handle, events in wanted.items():
                poller.register(handle, events)
            poller.poll()


def _finish(sink: socket.socket) -> None:
    """Tell the other side that no more comes, and wait until it closes: an earlier close could discard what it has not
    read yet."""
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
        sink.settimeout(LINGER_S)
        while sink.recv(CHUNK):
            pass


class _Copy:
    """One direction: bytes that were read and not yet written."""

    def __init__(self, source: socket.socket, sink: socket.socket):
        self.source, self.sink = source, sink
        self.buffer = memoryview(bytearray(CHUNK))
        self.rest = self.buffer[:0]

    def advance(self, wanted: dict[int, int]) -> bool:
        """Read or write something, or else add the event to wait for. Raises OSError at the end."""
        sock = self.sink if self.rest else self.source
        try:
            if self.rest:
                self.rest = self.rest[self.sink.send(self.rest) :]
            else:
                size = self.source.recv_into(self.buffer)
                if not size:
                    raise ConnectionResetError("closed")
                self.rest = self.buffer[:size]
            return True
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        except BlockingIOError:
            event = select.POLLOUT if self.rest else select.POLLIN
        wanted[sock.fileno()] = wanted.get(sock.fileno(), 0) | event
        return False
