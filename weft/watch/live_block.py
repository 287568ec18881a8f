"""A block of lines at the bottom of a terminal that is drawn again in place.

The cursor stays at the start of the block's first line. So a line that another process of the run writes takes the
place of the block, which is drawn again below it, instead of leaving a copy of the block behind.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

CLEAR = "\r\x1b[J"
"""Erases from the start of the line to the end of the screen: what a block left below the cursor."""


def over_block(text: str, stream: Any = None) -> str:
    """A line to write while another process may draw a block in the same terminal."""
    stream = sys.stderr if stream is None else stream
    return f"{CLEAR}{text}" if draws_blocks(stream) else text


def draws_blocks(stream: Any) -> bool:
    """Whether a block can be drawn on a stream: a terminal that moves its cursor."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    except (AttributeError, ValueError):
        return False


class LiveBlock:
    """A block on a console. While it is open, text written to sys.stderr appears above it."""

    def __init__(self, console: Console):
        self.console, self.drawn = console, ""
        self.errors = sys.stderr

    def open(self) -> None:
        self.errors = sys.stderr
        sys.stderr = LinesAbove(self.above)

    def draw(self, block: RenderableType) -> None:
        """Draw the block, in place of what was drawn before."""
        with self.console.capture() as captured:
            self.console.print(block)
        self.drawn = captured.get().rstrip("\n")
        up = self.drawn.count("\n")
        self._write(f"{CLEAR}{self.drawn}\r" + (f"\x1b[{up}A" if up else ""))

    def above(self, text: str) -> None:
        """Write a line above the block."""
        up = self.drawn.count("\n")
        self._write(f"{CLEAR}{text}\n{self.drawn}\r" + (f"\x1b[{up}A" if up else ""))

    def close(self) -> None:
        """Leave the block as it is, and continue below it."""
        sys.stderr = self.errors
        self._write(f"{CLEAR}{self.drawn}\n")

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


class LinesAbove(io.TextIOBase):
    """A stream whose lines appear above a block."""

    def __init__(self, above: Callable[[str], None]):
        self._above, self._line = above, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._above(line)
        return len(text)

    def isatty(self) -> bool:
        return True
