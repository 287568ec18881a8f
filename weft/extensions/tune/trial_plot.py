"""The trials of a search as an SVG: the loss over each tuned field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from weft.extensions.tune.search_space import Dimension
from weft.extensions.tune.successive_halving import Trial

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 340, 270, 62, 44, 16, 46
INSET = 10
"""Room between the frame and the outermost points."""
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.s{fill:#59636e}.p{fill:#fff}.a{stroke:#8c959f;fill:none}"
    ".g{stroke:#e3e6e9}.d{fill:#0969da}.b{fill:#cf222e}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.p{fill:#0d1117}.g{stroke:#262c33}"
    ".d{fill:#5cb3f0}.b{fill:#ff7b72}}"
)


def draw_trials(trials: Sequence[Trial], space: Sequence[Dimension]) -> str:
    """One panel for each field: the loss over its value. Larger points were trained longer, the best one is red."""
    shown = [trial for trial in trials if math.isfinite(trial.loss)]
    panels = [_panel(shown, dimension, i * WIDTH) for i, dimension in enumerate(space)]
    width = WIDTH * len(space)
    size = f'width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}"'
    legend = (
        '<circle class="b" cx="16" cy="16" r="5"/><text class="s" x="26" y="20">the best; larger: trained longer</text>'
    )
    page = '<rect class="p" width="100%" height="100%"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>Loss of the trials</title><style>{STYLE}</style>'
    return f"{head}{page}{legend}{''.join(panels)}</svg>\n"


def _panel(trials: Sequence[Trial], dimension: Dimension, x0: int) -> str:
    losses = [trial.loss for trial in trials]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    most = max((trial.steps for trial in trials), default=1)
    left, right, bottom = x0 + LEFT, x0 + WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(value: Any) -> float:
        return left + INSET + _share(dimension, value) * (right - left - 2 * INSET)

    def down(loss: float) -> float:
        return TOP + INSET + (high - loss) / ((high - low) or 1.0) * (bottom - TOP - 2 * INSET)

    out = [f'<text class="s" x="{x0 + 16}" y="{TOP - 6}">loss</text>']
    ticks = _round_numbers(low, high)
    for tick in ticks:
        y = down(tick)
        out.append(f'<path class="g" d="M{left} {y:.1f}H{right}"/>')
        out.append(f'<text class="s" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for value in _marked_values(dimension):
        x = across(value)
        out.append(f'<path class="a" d="M{x:.1f} {bottom}v4"/>')
        text = escape(f"{value:g}" if isinstance(value, float) else str(value))
        out.append(f'<text class="s" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    out.append(f'<rect class="a" x="{left}" y="{TOP}" width="{right - left}" height="{bottom - TOP}"/>')
    name = f"{escape(dimension.key)}{', logarithmic' if dimension.log else ''}"
    out.append(f'<text x="{(left + right) / 2:g}" y="{HEIGHT - 10}" text-anchor="middle">{name}</text>')
    for i, trial in reversed(list(enumerate(trials))):
        where = f'cx="{across(trial.values[dimension.key]):.1f}" cy="{down(trial.loss):.1f}"'
        radius = 3 + 4 * trial.steps / most
        out.append(f'<circle class="{"d" if i else "b"}" {where} r="{radius:.1f}" fill-opacity="0.8"/>')
    return "".join(out)


def _round_numbers(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers between two; the number itself where they are equal."""
    if not high > low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * f for f in (1, 2, 5, 10, 20) if (high - low) / (size * f) <= most)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _marked_values(dimension: Dimension) -> Sequence[Any]:
    """The values below an axis: those of a list, round numbers of a range, or powers of ten and its ends."""
    if dimension.values:
        return dimension.values
    if not dimension.log:
        return _round_numbers(dimension.low, dimension.high, 5)
    powers = range(math.ceil(math.log10(dimension.low)), math.floor(math.log10(dimension.high)) + 1)
    apart = [10.0**p for p in powers if 1.8 * dimension.low < 10.0**p < dimension.high / 1.8]
    return [dimension.low, *apart, dimension.high]


def _share(dimension: Dimension, value: Any) -> float:
    if dimension.values:
        return dimension.values.index(value) / max(1, len(dimension.values) - 1)
    if dimension.log:
        return math.log(value / dimension.low) / math.log(dimension.high / dimension.low)
    return float((value - dimension.low) / ((dimension.high - dimension.low) or 1.0))
