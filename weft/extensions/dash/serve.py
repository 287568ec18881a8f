"""Starts the web server of `weft dash`."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.extensions.dash.access import is_loopback
from weft.job.errors import MachineError

TOKEN_VARIABLE = "WEFT_DASH_TOKEN"
"""Holds the token, if one is to stay the same between starts."""


def serve(roots: Sequence[Path], host: str, port: int, open_browser: bool, log: Callable[[str], None]) -> None:
    """Serve the dashboard until interrupted. Port 0 takes a free one."""

    from weft.extensions.dash.app import create_app
    from weft.watch.runs.run_catalog import RunCatalog

    sock = listen_on(host, port)
    token = None if is_loopback(host) else os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    url = f"http://{shown}:{sock.getsockname()[1]}/" + (f"?token={token}" if token else "")
    log(f"dashboard: {url}  (Ctrl-C ends it; it only reads)")
    if token:
        log("anybody with this address can read the runs; traffic is not encrypted, so prefer an ssh tunnel")
    if open_browser:
        with contextlib.suppress(webbrowser.Error, OSError):
            webbrowser.open(url)
    with contextlib.suppress(KeyboardInterrupt):
        make_server(create_app(RunCatalog(roots), token)).run(sockets=[sock])


def make_server(app: Any, **limits: Any) -> Any:
    """uvicorn with limits of connections; `limits` are arguments of limited_protocol."""
    import uvicorn

    from weft.extensions.dash.connections import limited_protocol

    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False, ws="none",
            http=limited_protocol(**limits),
        )
    )  # fmt: skip


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)  # requests wait until the server has started
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        free = "give another --host or --port (port 0 takes a free one)"
        raise MachineError(f"cannot listen on {host}:{port}: {why}; {free}") from None
    return sock
