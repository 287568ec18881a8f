"""Draws the picture of docs/fewer-exchanges.md: python docs/make_sync.py"""

from __future__ import annotations

from pathlib import Path

from svg_style import begin_svg

HERE = Path(__file__).parent
COLOURS = ("#4477aa", "#ee6677", "#228833")
UNIT, ROW, LEFT, TOP, GAP = 26, 22, 150, 46, 34
END = 24
"""Units of time in the picture."""

Bars = list[list[tuple[float, float]]]
"""For each worker, the intervals in which it computes."""


def every_step(speeds: list[int]) -> tuple[Bars, list[float]]:
    """All wait for the slowest in every step; returns the bars and the times of the exchanges."""
    slowest = max(speeds)
    starts = [s for s in range(0, END, slowest) if s + slowest <= END]
    return [[(s, s + speed) for s in starts] for speed in speeds], [float(s + slowest) for s in starts]


def rounds(speeds: list[int], every: int) -> tuple[Bars, list[float]]:
    """Each trains alone for some steps; returns the bars and the times of the exchanges."""
    length = max(speeds) * every
    starts = [s for s in range(0, END, length) if s + length <= END]
    bars: Bars = [[(s + i * speed, s + (i + 1) * speed) for s in starts for i in range(every)] for speed in speeds]
    return bars, [float(s + length) for s in starts]


def server(speeds: list[int], staleness: int) -> tuple[Bars, list[tuple[float, int]], list[float]]:
    """Workers wait only if a gradient would be too old: the bars, the times of gradients and of updates."""
    version, held = 0, 0
    free, used = [0.0] * len(speeds), [0] * len(speeds)
    bars: Bars = [[] for _ in speeds]
    delivered: list[tuple[float, int]] = []
    updates: list[float] = []
    while True:
        who = min(range(len(speeds)), key=lambda w: free[w] + speeds[w])
        until = free[who] + speeds[who]
        if until > END:
            return bars, delivered, updates
        bars[who].append((free[who], until))
        delivered.append((until, who))
        held += 1
        free[who], used[who] = until, version
        if held >= len(speeds) and version + 1 - min(used) <= staleness:
            version, held = version + 1, 0
            updates.append(until)
            used[who] = version


def panel(
    top: int, title: str, names: list[str], bars: Bars, meets: list[float], thin: list[tuple[float, int]]
) -> list[str]:
    """One mode: a row for each worker, blocks where it computes, a line at each exchange."""
    out = [f'<text x="10" y="{top - 10}" font-size="13" font-weight="bold">{title}</text>']
    bottom = top + ROW * len(names)
    for row, (name, spans) in enumerate(zip(names, bars, strict=True)):
        y = top + row * ROW
        out.append(f'<text x="10" y="{y + 15}" class="c{row}">{name}</text>')
        for start, end in spans:
            where = (
                f'x="{LEFT + start * UNIT + 1:g}" y="{y + 2}" width="{(end - start) * UNIT - 2:g}" height="{ROW - 6}"'
            )
            out.append(f'<rect {where} rx="2" fill="{COLOURS[row]}"/>')
    for when in meets:
        x = LEFT + when * UNIT
        out.append(f'<path d="M{x:g} {top - 4}V{bottom}" class="ink" stroke-width="2"/>')
    for when, row in thin:
        x, middle = LEFT + when * UNIT, top + row * ROW + ROW / 2 - 1
        out.append(f'<circle cx="{x:g}" cy="{middle:g}" r="4" class="page ink"/>')
    return out


def picture() -> str:
    speeds, names = [1, 1, 3], ["worker 0", "worker 1", "worker 2, slow"]
    parts: list[tuple[str, Bars, list[float], list[tuple[float, int]]]] = []
    bars, meets = every_step(speeds)
    parts.append(("step: gradients are summed in every step (thick lines: all exchange)", bars, meets, []))
    bars, meets = rounds(speeds, 4)
    parts.append(("local:4, diloco:4: an exchange every 4 steps", bars, meets, []))
    bars, delivered, updates = server(speeds, 4)
    parts.append(
        (
            "server:async: circles push a gradient and pull weights; at each line three make an update",
            bars,
            updates,
            delivered,
        )
    )
    height = TOP + len(parts) * (ROW * len(names) + GAP)
    width = LEFT + END * UNIT + 20
    out = begin_svg(width, height, "When workers compute and when they come together, by train.sync", shown=False)
    for i, part in enumerate(parts):
        out += panel(TOP + i * (ROW * len(names) + GAP), part[0], names, *part[1:])
    return "\n".join([*out, "</svg>"]) + "\n"


def images() -> dict[Path, str]:
    return {HERE / "images" / "fewer-exchanges.svg": picture()}


def main() -> None:
    for path, drawn in images().items():
        path.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
