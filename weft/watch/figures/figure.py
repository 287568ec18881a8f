"""A figure of a page, and how the values of run files are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """What figures.js draws, or a sentence if there is nothing to draw.

    `data` holds traces: `scatter` (mode lines, markers or both), `bar`, or one `heatmap`. Their keys and those of
    `layout` are plotly's, as far as figures.js reads them; a colour such as @blue is the page's. `hovertext` is plain
    text.
    """

    id: str
    title: str
    caption: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 280
    max_width: int | None = None
    empty: str = "No step has recorded this yet."


def number(value: Any) -> float | None:
    """The value as a finite number, or None if it is not one."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def unit_of(records: Sequence[Record]) -> str:
    """What the targets of a run are, which the keys of its records call tokens: tokens, or samples."""
    return str(records[-1].get("unit") or "tokens") if records else "tokens"


def column(records: Sequence[Record], key: str) -> tuple[list[float], list[float | None]]:
    """The steps, and the value of one key at each."""
    return [float(r["step"]) for r in records], [number(r.get(key)) for r in records]
