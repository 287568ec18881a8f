"""Draws the picture of docs/experts.md: python docs/make_experts.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from svg_style import begin_svg

HERE = Path(__file__).parent
COLOURS = ("#77aadd", "#ee8899", "#66bb77", "#ddcc66")
RANKS, EXPERTS, TOP = 2, 4, 2
CHOICES = (((0, 2), (1, 3), (0, 1), (2, 0)), ((3, 1), (0, 3), (2, 1), (3, 0)))
"""The experts of each rank's four tokens."""
CELL, LEFT, TOP_EDGE, COLUMN, ROW = 22, 80, 92, 226, 156

Use = tuple[int, int, int]
"""The rank and number of a token, and one of its experts."""
Line = tuple[str, list[Use]]
"""What a line of cells has in common, and its cells."""


def columns() -> list[tuple[str, str, list[list[Line]]]]:
    """What each rank holds in each stage: a heading, what happens next, and lines of uses of tokens."""
    chosen = [[(rank, t, e) for t, both in enumerate(CHOICES[rank]) for e in both] for rank in range(RANKS)]
    ordered = [sorted(uses, key=lambda u: u[2]) for uses in chosen]
    here = EXPERTS // RANKS
    arrived = [[u for uses in ordered for u in uses if u[2] // here == rank] for rank in range(RANKS)]
    of_expert = lambda e: f"expert {e}"  # noqa: E731
    of_rank = lambda r: f"from rank {r}"  # noqa: E731
    return [
        ("tokens, twice each", "the router has chosen", [[("", uses[:4]), ("", uses[4:])] for uses in chosen]),
        ("sorted by expert", "all-to-all", [lines(uses, 2, of_expert) for uses in ordered]),
        ("arrived", "sorted again", [lines(uses, 0, of_rank) for uses in arrived]),
        ("one grouped product", "back, and weighted sums", [lines(uses, 2, of_expert) for uses in arrived]),
    ]


def lines(uses: list[Use], part: int, name: Callable[[int], str]) -> list[Line]:
    """A line for each value of a part of the uses."""
    return [(name(value), [u for u in uses if u[part] == value]) for value in sorted({u[part] for u in uses})]


def experts_svg(title: str) -> str:
    """Each use of a token is a cell: its colour is the expert's, its text the token's."""
    parts = columns()
    width, height = LEFT + len(parts) * COLUMN, TOP_EDGE + RANKS * ROW
    out = begin_svg(width, height, title)
    for e in range(EXPERTS):
        out.append(f'<rect x="{LEFT + e * 150}" y="38" width="14" height="14" rx="3" fill="{COLOURS[e]}"/>')
        out.append(f'<text x="{LEFT + e * 150 + 20}" y="50">expert {e}, on rank {e // (EXPERTS // RANKS)}</text>')
    for c, (heading, then, ranks) in enumerate(parts):
        x = LEFT + c * COLUMN
        out.append(f'<text x="{x}" y="{TOP_EDGE - 10}" font-weight="bold">{heading}</text>')
        for rank in range(RANKS):
            y = TOP_EDGE + rank * ROW
            if c == 0:
                out.append(f'<text x="10" y="{y + 16}">rank {rank}</text>')
            for row, (name, uses) in enumerate(ranks[rank]):
                top = y + row * (CELL + 6)
                begin = x + (80 if name else 0)
                out.append(f'<text class="soft" x="{x}" y="{top + 15}">{name}</text>' if name else "")
                for i, (of, token, e) in enumerate(uses):
                    left = begin + i * (CELL + 3)
                    out.append(
                        f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" rx="3" fill="{COLOURS[e]}"/>'
                    )
                    out.append(
                        f'<text x="{left + CELL / 2:g}" y="{top + 15}" text-anchor="middle" fill="#14171a" '
                        f'font-size="11">{"ab"[of]}{token}</text>'
                    )
            out.append(f'<text class="soft" x="{x}" y="{y + len(ranks[rank]) * (CELL + 6) + 14}">→ {then}</text>')
    return "\n".join([*filter(None, out), "</svg>"]) + "\n"


def images() -> dict[Path, str]:
    return {
        HERE / "images" / "experts.svg": experts_svg("Dispatch and combine: 2 ranks, 4 tokens each, 2 of 4 experts")
    }


def main() -> None:
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
