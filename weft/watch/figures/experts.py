"""The figure of expert load: every expert of every block over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from weft.watch.figures.figure import Figure, Record

COLUMNS, ROWS = 120, 256
"""Most steps and experts that are drawn; with more steps, each column is a mean."""
COLOURS = [[0.0, "#2166ac"], [0.5, "#f4f4f4"], [1.0, "#b2182b"]]


def expert_figure(records: Sequence[Record]) -> Figure | None:
    """Heat map of each expert's load relative to an even share; None for a run without experts."""
    found = [(r["step"], e) for r in records if isinstance(e := r.get("experts"), dict) and _counts(e)]
    if not found:
        return None
    size = -(-len(found) // COLUMNS)
    bins = [found[i : i + size] for i in range(0, len(found), size)]
    last = found[-1][1]
    blocks = last.get("blocks") or []
    names = [f"{b}" for b in blocks] if len(blocks) == len(_counts(last)) else ["all"]
    rows, labels = [], []
    for b, name in enumerate(names):
        for e in range(len(_counts(last)[b])):
            rows.append([fmean(_over_even(x, b, e) for _, x in part) for part in bins])
            labels.append(f"{name}·{e}")
    shown = rows[:ROWS]
    dropped = f", {last['dropped_share']:.1%} of the last step's dropped" if last.get("dropped") else ""
    more = f" The first {ROWS} of {len(rows)} are shown." if len(rows) > ROWS else ""
    caption = (
        f"Tokens of each expert relative to an even share: 1 is even, 2 is twice as many. In the last step the most "
        f"loaded expert had {last.get('max_over_mean', 0):.2f} times the mean of its block{dropped}.{more}"
    )
    trace = {
        "type": "heatmap",
        "x": [part[-1][0] for part in bins],
        "y": labels[:ROWS],
        "z": [[round(v, 2) for v in row] for row in shown],
        "zmin": 0,
        "zmax": 2,
        "colorscale": COLOURS,
        "colorbar": {"title": {"text": "times an even share"}},
    }
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "block·expert"}},
    }
    return Figure("experts", "Experts' load", caption, [trace], layout, height=min(900, 140 + 10 * len(shown)))


def _counts(experts: dict[str, Any]) -> list[list[int]]:
    counts = experts.get("counts")
    return (
        counts if isinstance(counts, list) and counts and all(isinstance(row, list) and row for row in counts) else []
    )


def _over_even(experts: dict[str, Any], block: int, expert: int) -> float:
    rows = _counts(experts)
    if block >= len(rows) or expert >= len(rows[block]):
        return 0.0
    return float(rows[block][expert] / max(1e-9, fmean(rows[block])))
