"""Draws the picture of docs/resilience.md: python docs/make_resilience.py"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from svg_style import begin_svg

HERE = Path(__file__).parent
COLOURS = {"compute": "#4477aa", "wait": "#bbccee", "regroup": "#ccbb44", "dead": "#ee6677", "spare": "none"}
WORDS = {"compute": "a step", "wait": "waits in a collective", "regroup": "regroups and loads", "spare": "warm spare"}
LEFT, TOP, ROW, BAR, SECOND = 120, 66, 40, 24, 150
KILLED, SEEN, READY, END = 2.3, 2.6, 3.6, 5.6
"""Times in the picture, in lengths of a step; not measured. Figures are in bench/chaos.md."""


class Bar(NamedTuple):
    """What a process does from one moment to another."""

    what: str
    begin: float
    end: float
    label: str = ""


def rows() -> dict[str, list[Bar]]:
    """Each process, and what it does: rank 2 is killed in the middle of step 3."""
    before = [Bar("compute", 0, 1, "step 1"), Bar("compute", 1, 2, "step 2")]
    after = [
        Bar("regroup", SEEN, READY),
        Bar("compute", READY, READY + 1, "step 3"),
        Bar("compute", READY + 1, END, "step 4"),
    ]
    living = [*before, Bar("compute", 2, KILLED), Bar("wait", KILLED, SEEN), *after]
    return {
        "rank 0": living,
        "rank 1": living,
        "rank 2": [*before, Bar("compute", 2, KILLED)],
        "rank 3": living,
        "spare": [Bar("spare", 0, SEEN, "has imported torch and waits"), *after],
    }


def svg(title: str) -> str:
    width, height = LEFT + int(END * SECOND) + 20, TOP + 5 * ROW + 84
    out = begin_svg(width, height, title)
    for i, (name, bars) in enumerate(rows().items()):
        y = TOP + i * ROW
        out.append(f'<text x="10" y="{y + 16}">{name}{" → rank 2" if name == "spare" else ""}</text>')
        for bar in bars:
            x, w = LEFT + bar.begin * SECOND, (bar.end - bar.begin) * SECOND
            edge = ' class="faint"' if bar.what == "spare" else ""
            out.append(f'<rect x="{x:g}" y="{y}" width="{w - 2:g}" height="{BAR}" fill="{COLOURS[bar.what]}"{edge}/>')
            ink = ' fill="white"' if bar.what == "compute" else ""
            if bar.label:
                out.append(f'<text x="{x + 6:g}" y="{y + 16}"{ink}>{bar.label}</text>')
        if name == "rank 2":
            x = LEFT + KILLED * SECOND
            out.append(
                f'<path d="M{x - 7:g} {y + 5}l14 14m0 -14l-14 14" stroke="{COLOURS["dead"]}" stroke-width="4"/>'
                f'<text x="{x + 14:g}" y="{y + 16}" fill="{COLOURS["dead"]}">kill -9</text>'
            )
    for at, words in ((KILLED, "fault"), (SEEN, "detected"), (READY, "goes on")):
        x = LEFT + at * SECOND
        out.append(f'<path d="M{x:g} {TOP - 12}V{TOP + 5 * ROW}" class="ink" stroke-dasharray="3 3"/>')
        out.append(f'<text x="{x:g}" y="{TOP - 18}" text-anchor="{"end" if at == KILLED else "start"}">{words}</text>')
    y = TOP + 5 * ROW + 14
    lost = "after step 2 each rank's state is in shared memory, which survives the process: step 3 is computed again"
    out.append(f'<text x="{LEFT}" y="{y + 6}">{lost}</text>')
    for i, (what, words) in enumerate(WORDS.items()):
        x = LEFT + i * 190
        edge = ' class="faint"' if what == "spare" else ""
        out.append(f'<rect x="{x}" y="{y + 26}" width="16" height="16" fill="{COLOURS[what]}"{edge}/>')
        out.append(f'<text x="{x + 22}" y="{y + 39}">{words}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def images() -> dict[Path, str]:
    return {
        HERE / "images" / "resilience.svg": svg("A rank is killed in the middle of step 3, and a spare replaces it")
    }


def main() -> None:
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
