"""The trials of a search as an SVG: the loss over each tuned field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from weft.extensions.tune.search_space import Dimension
from weft.extensions.tune.successive_halving import Trial

WIDTH, HEIGHT, LEFT, TOP = 320, 240, 56, 36
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.a{stroke:#8c959f;fill:none}.d{fill:#0969da}.b{fill:#cf222e}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}}"
)


def draw_trials(trials: Sequence[Trial], space: Sequence[Dimension]) -> str:
    """One panel for each field; larger points were trained longer, the best one is red."""
    shown = [trial for trial in trials if math.isfinite(trial.loss)]
    panels = [_panel(shown, dimension, i * WIDTH) for i, dimension in enumerate(space)]
    size = f'width="{WIDTH * len(space)}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(panels)}</svg>\n'


def _panel(trials: Sequence[Trial], dimension: Dimension, x0: int) -> str:
    losses = [trial.loss for trial in trials]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    most = max((trial.steps for trial in trials), default=1)
    inner_w, inner_h = WIDTH - LEFT - 16, HEIGHT - TOP - 40
    out = [f'<text x="{x0 + LEFT}" y="20">loss over {escape(dimension.key)}</text>']
    out.append(f'<rect class="a" x="{x0 + LEFT}" y="{TOP}" width="{inner_w}" height="{inner_h}"/>')
    out += [
        f'<text x="{x0 + LEFT - 6}" y="{y}" text-anchor="end">{value:.3g}</text>'
        for value, y in ((high, TOP + 10), (low, TOP + inner_h))
    ]
    ends = (dimension.values[0], dimension.values[-1]) if dimension.values else (dimension.low, dimension.high)
    for end, x, anchor in ((ends[0], x0 + LEFT, "start"), (ends[1], x0 + LEFT + inner_w, "end")):
        out.append(f'<text x="{x}" y="{TOP + inner_h + 18}" text-anchor="{anchor}">{escape(str(end))}</text>')
    for i, trial in reversed(list(enumerate(trials))):
        across = x0 + LEFT + 8 + _share(dimension, trial) * (inner_w - 16)
        down = TOP + 8 + (high - trial.loss) / ((high - low) or 1.0) * (inner_h - 16)
        radius = 3 + 4 * trial.steps / most
        kind = "b" if i == 0 else "d"
        out.append(f'<circle class="{kind}" cx="{across:.1f}" cy="{down:.1f}" r="{radius:.1f}" fill-opacity="0.8"/>')
    return "".join(out)


def _share(dimension: Dimension, trial: Trial) -> float:
    value = trial.values[dimension.key]
    if dimension.values:
        return dimension.values.index(value) / max(1, len(dimension.values) - 1)
    if dimension.log:
        return math.log(value / dimension.low) / math.log(dimension.high / dimension.low)
    return (value - dimension.low) / (dimension.high - dimension.low)
