"""Logging: a full file for each rank, and short messages on the console."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO

from weft.job.files.run_folder import RunDir

NAME = "weft"


def setup(run: RunDir, rank: int, position: str, world: int) -> logging.Logger:
    """Set up and return the logger of this rank; calling it again replaces its handlers.

    `position` is the rank's position in the mesh, such as `dp_shard1 tp0`.
    """
    run.logs.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger(NAME)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    for old in [h for h in logger.handlers if isinstance(h, _File | _Console)]:
        logger.removeHandler(old)
        old.close()
    file = _File(run.logs / f"rank-{rank}.log", mode="a", encoding="utf-8")
    file.setLevel(logging.DEBUG)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    console = _Console()
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    console.setFormatter(_Prefixed(f"[rank {rank} {position}".rstrip() + "]"))
    logger.addHandler(file)
    logger.addHandler(console)
    logger.debug("rank %d of %d%s", rank, world, f", {position}" if position else "")
    return logger


class _File(logging.FileHandler):
    """Writes to a rank's log. Lines that a full disk does not accept are lost; the console has warnings."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback for each line."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _Console(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, so that lines appear above a live progress bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("the console's stream is always sys.stderr")

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore errors of a closed terminal; the log file has the line."""


class _Prefixed(logging.Formatter):
    """Adds rank and level to warnings and errors."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return f"{self._prefix} {record.levelname}: {text}"
