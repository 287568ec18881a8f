"""What lessons print: sentences in the chosen language, and predicted figures beside measured ones."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from weft.cli.lessons.language import t

__all__ = ["say", "show", "t"]


def say(text: str = "", **values: object) -> None:
    """Print a sentence in the chosen language."""
    print(t(text, **values), flush=True)


def show(rows: Sequence[tuple[str, object, object]], columns: tuple[str, str] = ("predicted", "measured")) -> None:
    """Print a table of a label and two figures a row. The columns line up in Chinese too."""
    cells = [("", *(t(column) for column in columns)), *((label, _text(a), _text(b)) for label, a, b in rows)]
    widths = [max(_width(row[i]) for row in cells) for i in range(3)]
    for label, a, b in cells:
        print(f"{_pad(label, widths[0])}  {_pad(a, -widths[1])}  {_pad(b, -widths[2])}".rstrip(), flush=True)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _width(text: str) -> int:
    """Columns in a terminal: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int) -> str:
    """Padded on the right, or on the left for a negative width."""
    space = " " * (abs(width) - _width(text))
    return text + space if width > 0 else space + text
