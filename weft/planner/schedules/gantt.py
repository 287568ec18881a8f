"""Gantt charts of a pipeline's time line: as text for the terminal and as SVG for pages."""

from __future__ import annotations

import html
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

from weft.planner.schedules.simulate import Span, Timeline


@dataclass(frozen=True)
class Look:
    """How a kind of action is drawn, in Okabe and Ito's colours for the colour-blind."""

    word: str
    fill: str
    colour: str


STYLES: dict[str, Look] = {
    "send": Look("send", "→", "#9aa0a6"),
    "recv": Look("receive", "←", "#c9a58b"),
    "F": Look("forward", "░", "#56b4e9"),
    "B": Look("backward", "█", "#e69f00"),
    "I": Look("gradient of the input", "▓", "#cc79a7"),
    "W": Look("gradient of the weights", "▒", "#009e73"),
}
"""In drawing order: computation is drawn over messages."""

IDLE = Look("idle", "·", "")
_DIGITS = string.digits + string.ascii_lowercase + string.ascii_uppercase


def gantt_text(timeline: Timeline, width: int = 100) -> str:
    """One row per rank, followed by a legend and the bubble."""
    ranks = len(timeline.idle)
    head = len(f"rank {ranks - 1}") + 1
    cells = max(8, width - head)
    scale = _scale(timeline, cells)
    rows = []
    for rank in range(ranks):
        line = [IDLE.fill] * max(1, round(timeline.length * scale))
        for span in _drawn(timeline.spans, rank):
            start, stop = round(span.start * scale), round(span.end * scale)
            line[start:stop] = _marked(span, stop - start)
        rows.append(f"rank {rank}".ljust(head) + "".join(line))
    signs = [f"{look.fill} {look.word}" for look in _legend(timeline)]
    summary = f"bubble {timeline.bubble:.1%} of {timeline.length:.4g}"
    return "\n".join([*rows, *_wrapped([*signs, f"{IDLE.fill} {IDLE.word}", summary], width)]) + "\n"


def _scale(timeline: Timeline, cells: int) -> float:
    """Cells per unit of time. If all actions are multiples of the shortest, it has a whole number of cells."""
    if timeline.length <= 0:
        return 0.0
    lengths = [s.end - s.start for s in timeline.spans if s.end > s.start]
    fill = cells / timeline.length
    shortest = min(lengths, default=0.0)
    even = shortest > 0 and all(abs(n / shortest - round(n / shortest)) < 1e-6 for n in lengths)
    whole = math.floor(fill * shortest) if even else 0
    return whole / shortest if whole else fill


def _marked(span: Span, cells: int) -> list[str]:
    """The number of the microbatch and the sign of the kind; a single cell shows the number only for F."""
    fill = STYLES[span.kind].fill
    named = span.kind in "FBIW" and (cells > 1 or (cells == 1 and span.kind == "F"))
    if not named or span.microbatch >= len(_DIGITS):
        return [fill] * cells
    return [_DIGITS[span.microbatch], *[fill] * (cells - 1)]


def _drawn(spans: Sequence[Span], rank: int) -> list[Span]:
    order = list(STYLES)
    return sorted((s for s in spans if s.rank == rank and s.kind in STYLES), key=lambda s: order.index(s.kind))


def _legend(timeline: Timeline) -> list[Look]:
    kinds = {span.kind for span in timeline.spans}
    return [STYLES[kind] for kind in ("F", "B", "I", "W", "send", "recv") if kind in kinds]


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 3 + len(word) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + word
    return lines


_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _GAP = 960, 66, 16, 44, 30, 5
_BLOCK, _BREAK = 24, 26
"""Width of a typical action of a step too long to be drawn whole, and of the gap where a part of it is left out."""
_STYLE = """
.gantt text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.gantt .bg{fill:#ffffff}.gantt .ink{fill:#1c1e21}.gantt .soft{fill:#5c636b}.gantt .track{fill:#ecedef}
.gantt .tick{stroke:#c9ccd0}.gantt .name{font-weight:600;font-size:15px}
.gantt .on{fill:#14171a;font-size:12px;text-anchor:middle}
@media (prefers-color-scheme:dark){
.gantt .bg{fill:#1c1f24}.gantt .ink{fill:#e8eaed}.gantt .soft{fill:#a3abb3}.gantt .track{fill:#30353c}
.gantt .tick{stroke:#565d66}}
"""


@dataclass(frozen=True)
class _Stretch:
    """A part of the time line and its place in the picture."""

    start: float
    end: float
    x: float
    scale: float

    def at(self, time: float) -> float:
        return self.x + (min(max(time, self.start), self.end) - self.start) * self.scale


def is_shortened(timeline: Timeline) -> bool:
    """Whether an SVG of the time line shows only its begin, middle and end, because its actions would be too thin."""
    lengths = sorted(s.end - s.start for s in timeline.spans if s.kind in "FBIW" and s.end > s.start)
    if not lengths:
        return False
    return timeline.length > 1.5 * lengths[len(lengths) // 2] * (_WIDTH - _LEFT - _RIGHT) / _BLOCK


def _stretches(timeline: Timeline, until: float) -> list[_Stretch]:
    room = float(_WIDTH - _LEFT - _RIGHT)
    if not is_shortened(timeline):
        end = max(until, timeline.length) or 1.0
        return [_Stretch(0.0, end, _LEFT, room / end)]
    lengths = sorted(s.end - s.start for s in timeline.spans if s.kind in "FBIW" and s.end > s.start)
    scale, wide = _BLOCK / lengths[len(lengths) // 2], (room - 2 * _BREAK) / 3
    long = wide / scale
    starts = (0.0, (timeline.length - long) / 2, timeline.length - long)
    return [_Stretch(start, start + long, _LEFT + i * (wide + _BREAK), scale) for i, start in enumerate(starts)]


def gantt_svg(timeline: Timeline, title: str, until: float | None = None, unit: str = "long") -> str:
    """An SVG for light and dark pages. `until` is the end of its axis, to compare several pictures. Of a step with
    very many actions it shows the begin, the middle and the end."""
    ranks = len(timeline.idle)
    stretches = _stretches(timeline, until or 0.0)
    bottom = _TOP + ranks * (_ROW + _GAP)
    height = bottom + 62
    out = [
        f'<svg class="gantt" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="bg" width="{_WIDTH}" height="{height}" rx="8"/>',
        f'<text class="ink name" x="16" y="26">{html.escape(title)}</text>',
        f'<text class="soft" x="{_WIDTH - _RIGHT}" y="26" text-anchor="end">bubble {timeline.bubble:.1%}, '
        f"{timeline.length:.4g} {unit}</text>",
    ]
    for rank in range(ranks):
        y = _TOP + rank * (_ROW + _GAP)
        out.append(f'<text class="ink" x="16" y="{y + _ROW / 2 + 4.5:g}">rank {rank}</text>')
        spans = _drawn(timeline.spans, rank)
        stages = sorted({s.stage for s in timeline.spans if s.rank == rank})
        for part in stretches:
            wide = part.at(timeline.length) - part.x
            out.append(f'<rect class="track" x="{part.x:g}" y="{y}" width="{wide:.2f}" height="{_ROW}"/>')
            for span in spans:
                if (span.end > part.start and span.start < part.end) or len(stretches) == 1:
                    x = part.at(span.start)
                    out.append(_block(span, stages, x, y, part.at(span.end) - x))
    first, last = _TOP + _ROW / 2 + 4, bottom - _GAP - _ROW / 2 + 4
    for part in stretches[1:]:
        for level in sorted({first, last}):
            out.append(f'<text class="soft" x="{part.x - _BREAK / 2:g}" y="{level:g}" text-anchor="middle">⋯</text>')
    for part in stretches:
        out += _axis(part, stretches[0].end if len(stretches) == 1 else 3 * (part.end - part.start), bottom)
    out += _key(timeline, height - 14)
    return "\n".join([*out, "</svg>"]) + "\n"


def _block(span: Span, stages: Sequence[int], x: float, y: float, wide: float) -> str:
    look = STYLES[span.kind]
    colour = paler(look.colour, stages.index(span.stage) / max(2, len(stages)))
    label_text = f"{look.word}, stage {span.stage}, microbatch {span.microbatch}, {span.start:.4g} to {span.end:.4g}"
    inset = 0.5 if wide > 2 else 0.0
    text = f"{span.microbatch}"
    label = ""
    if wide >= 7 * len(text) + 2:
        label = f'<text class="on" x="{x + wide / 2:.2f}" y="{y + _ROW / 2 + 4.5:g}">{text}</text>'
    return (
        f'<g><title>{label_text}</title><rect x="{x + inset:.2f}" y="{y}" width="{max(wide - 2 * inset, 0):.2f}" '
        f'height="{_ROW}" fill="{colour}"/>{label}</g>'
    )


def paler(colour: str, share: float) -> str:
    """The colour mixed with white, for later stages of a rank."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share * 1.2):02x}" for c in parts)


def _axis(part: _Stretch, shown: float, y: float) -> list[str]:
    step = 10.0 ** math.floor(math.log10(shown))
    step = next(step * f for f in (0.1, 0.2, 0.5, 1, 2) if shown / (step * f) <= 12)
    out = []
    for i in range(math.ceil(part.start / step - 1e-9), math.floor(part.end / step + 1e-9) + 1):
        x = part.at(i * step)
        out.append(f'<line class="tick" x1="{x:.2f}" x2="{x:.2f}" y1="{y - 2:g}" y2="{y + 4:g}"/>')
        out.append(f'<text class="soft" x="{x:.2f}" y="{y + 18:g}" text-anchor="middle">{i * step:.4g}</text>')
    return out


def _key(timeline: Timeline, y: float) -> list[str]:
    out, x = [], float(_LEFT)
    most = max((len({s.stage for s in timeline.spans if s.rank == r}) for r in range(len(timeline.idle))), default=1)
    entries = [(look.word, f'fill="{look.colour}"') for look in _legend(timeline)] + [(IDLE.word, 'class="track"')]
    for word, paint in entries:
        out.append(f'<rect x="{x:g}" y="{y - 11:g}" width="13" height="13" {paint}/>')
        out.append(f'<text class="soft" x="{x + 19:g}" y="{y:g}">{word}</text>')
        x += 19 + 6.6 * len(word) + 24
    if most > 1:
        out.append(f'<text class="soft" x="{x:g}" y="{y:g}">paler: a later stage of the rank</text>')
    return out
