"""Names of a run's processes, as `ps` and `top` show them."""

from __future__ import annotations

import contextlib
from pathlib import Path


def set_process_name(name: str) -> None:
    """Name this process, on Linux; the kernel keeps 15 characters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="utf-8")
