"""A dashboard that serves a folder of runs, and a browser."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from weft.extensions.dash.app import create_app
from weft.extensions.dash.serve import listen_on, make_server
from weft.watch.runs.run_catalog import RunCatalog

POLL_S = 0.1


@contextlib.contextmanager
def serving(root: Path, token: str | None = None, host: str = "127.0.0.1", **limits: Any) -> Iterator[str]:
    """The address of a dashboard over a folder."""
    sock = listen_on(host, 0)
    app = create_app(RunCatalog([root]), token, POLL_S)
    server = make_server(app, **limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        sock.close()


@pytest.fixture
def dashboard() -> Callable[..., contextlib.AbstractContextManager[str]]:
    return serving


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=120_000)  # 5 s, the default, is too short on a busy machine
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=flags)
        yield found
        found.close()
