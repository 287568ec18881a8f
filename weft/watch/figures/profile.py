"""The figure of a profiled step: one stacked bar a rank, and the table of the first rank's classes."""

from __future__ import annotations

import json
from typing import Any

from weft.watch.figures.figure import Figure
from weft.watch.kernel_classes import CLASSES
from weft.watch.kernel_profile import ProfileRow, from_json, rate_of

MAX_RANKS = 32
TITLE = "Where a step's time goes"
HEADER = ["class", "ms", "share", "calls", "rate", "roof", "time over roof"]
COLOURS = dict(
    zip(CLASSES, ("@blue", "@purple", "@orange", "@green", "#E0B000", "@quiet", "@soft", "@grid"), strict=True)
)


def read_profile(text: str) -> list[list[ProfileRow]] | None:
    """The rows of every rank in a profile.json; None if it is not valid."""
    try:
        raw = json.loads(text)
        ranks = [from_json(rank["classes"]) for rank in raw["ranks"]]
        sound = all(isinstance(r.ms, int | float) and isinstance(r.share, int | float) for rank in ranks for r in rank)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return ranks if ranks and sound else None


def profile_figure(text: str) -> Figure | None:
    """The figure of a profile.json, or None if its text is empty (there is no file)."""
    if not text:
        return None
    ranks = read_profile(text)
    if ranks is None:
        return Figure("profile", TITLE, empty="profile.json could not be understood.")
    shown = ranks[:MAX_RANKS]
    data: list[dict[str, Any]] = []
    for name in CLASSES:
        rows = [next((r for r in rank if r.name == name), None) for rank in shown]
        if any(rows):
            data.append(_trace(name, rows))
    longest = max(sum(r.ms for r in rank) for rank in shown)
    layout = {
        "barmode": "stack",
        "showlegend": True,
        "xaxis": {"title": {"text": "milliseconds"}, "range": [0, longest * 1.01]},
        "yaxis": {
            "tickvals": list(range(len(shown))),
            "ticktext": [f"rank {i}" for i in range(len(shown))],
            "range": [len(shown) - 0.4, -0.6],
            "showgrid": False,
        },
    }
    return Figure("profile", TITLE, _caption(text, ranks), data, layout, height=150 + 44 * len(shown))


def _trace(name: str, rows: list[ProfileRow | None]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(range(len(rows))),
        "x": [r.ms if r else 0.0 for r in rows],
        "width": 0.7,
        "marker": {"color": COLOURS[name]},
        "hovertext": [_hover(r) if r else "" for r in rows],
    }


def _hover(row: ProfileRow) -> str:
    rate, roof = rate_of(row)
    lines = [f"{row.name}: {row.ms:.3g} ms, {row.share:.1%}"]
    if row.distance is not None:
        lines.append(f"{rate}, roof {roof}: {row.distance:.2f}× the time at the roof")
    kernels = row.top or []
    lines += [f"{k['ms']:.3g} ms  {k['name']}" for k in kernels if k.get("ms")]
    return "\n".join(lines)


def _caption(text: str, ranks: list[list[ProfileRow]]) -> str:
    raw = json.loads(text)
    sentences = [f"One step of {raw.get('layout') or 'the job'} in {raw.get('precision') or 'its precision'}"]
    if isinstance(raw.get("step_ms"), int | float):
        sentences.append(f"takes {raw['step_ms']:.4g} ms.")
    sentences.append("A roof is the rate measured on random data, or that of the data sheet. The table is for rank 0.")
    if len(ranks) > MAX_RANKS:
        sentences.append(f"The first {MAX_RANKS} of {len(ranks)} ranks are drawn.")
    return " ".join(sentences)


def profile_table(text: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the first rank's table, as text."""
    ranks = read_profile(text)
    if ranks is None:
        return HEADER, []
    rows = []
    for r in ranks[0]:
        rate, roof = rate_of(r)
        away = "–" if r.distance is None else f"{r.distance:.2f}×"
        rows.append([r.name, f"{r.ms:.2f}", f"{r.share:.1%}", f"{r.calls or 0:,.0f}", rate, roof, away])
    return HEADER, rows
