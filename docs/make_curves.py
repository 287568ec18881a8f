"""Draws the picture of docs/precision.md from what bench/curves.py measured: python docs/make_curves.py"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from svg_style import begin_svg

HERE = Path(__file__).resolve().parent
COLOURS = ("", "#2f8fd0", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's colour-blind safe palette; the first is the ink of the page."""
WIDTH, PANEL, LEFT, TOP, GAP = 760, 220, 70, 54, 56
Points = Sequence[Sequence[float]]


def draw(result: dict[str, Any]) -> str:
    """Two panels over the steps: validation loss, and its difference from the first case's in per cent."""
    runs: dict[str, dict[str, Any]] = result["runs"]
    first = next(iter(runs))
    base = dict(map(tuple, runs[first]["val_loss"]))
    values = {case: [(s, v) for s, v in run["val_loss"]] for case, run in runs.items()}
    apart = {c: [(s, 100 * (v / base[s] - 1)) for s, v in points if s in base] for c, points in values.items()}
    model = result["model"].get("shape") or f"{result['model']['dim']} wide, {result['model']['layers']} layers"
    title = f"{model}, {result['tokens_per_step']:,} tokens a step, {result['device']}"
    height = TOP + 2 * PANEL + GAP + 46
    parts = [
        *begin_svg(WIDTH, height, title, shown=False),
        _text(LEFT, 20, title, size=14),
        *_legend(list(runs)),
        *_panel(values, TOP, result["steps"], "validation loss", lambda v: f"{v:.3g}"),
        *_panel(apart, TOP + PANEL + GAP, result["steps"], f"% from {first}", lambda v: f"{v:+.2g}"),
        _text(LEFT + (WIDTH - LEFT - 20) / 2, height - 8, "step", anchor="middle"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _legend(cases: list[str]) -> list[str]:
    out = []
    for i, case in enumerate(cases):
        x = LEFT + 110 * i
        out.append(f'<line x1="{x}" y1="38" x2="{x + 22}" y2="38" {_ink(i)} stroke-width="2.5"/>')
        out.append(_text(x + 28, 42, case))
    return out


def _panel(curves: Mapping[str, Points], top: float, steps: int, name: str, form: Callable[[float], str]) -> list[str]:
    heights = [v for points in curves.values() for _, v in points]
    low, high = min(heights), max(heights)
    margin = 0.06 * (high - low) or 1e-3
    low, high = low - margin, high + margin
    right = WIDTH - 20

    def across(step: float) -> float:
        return LEFT + (right - LEFT) * step / steps

    def down(value: float) -> float:
        return top + PANEL * (high - value) / (high - low)

    out = [f'<rect x="{LEFT}" y="{top}" width="{right - LEFT}" height="{PANEL}" fill="none" class="faint"/>']
    for tick in _ticks(low, high):
        y = down(tick)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
        out.append(_text(LEFT - 6, y + 4, form(tick), anchor="end"))
    for tick in _ticks(0, steps):
        out.append(_text(across(tick), top + PANEL + 16, f"{tick:g}", anchor="middle"))
    for i, points in enumerate(curves.values()):
        path = " ".join(f"{across(s):.1f},{down(v):.1f}" for s, v in points)
        out.append(f'<polyline points="{path}" fill="none" {_ink(i)} stroke-width="2"/>')
    middle = top + PANEL / 2
    out.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(name)}</text>')
    return out


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs(s - raw))
    first = math.ceil(low / step)
    return [step * i for i in range(first, math.floor(high / step) + 1)]


def _ink(case: int) -> str:
    return f'stroke="{COLOURS[case]}"' if COLOURS[case] else 'class="ink"'


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def images() -> dict[Path, str]:
    measured = json.loads((HERE.parent / "bench" / "curves.json").read_text(encoding="utf-8"))
    return {HERE / "images" / "curves.svg": draw(measured)}


def main() -> None:
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
