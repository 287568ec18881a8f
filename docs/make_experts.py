"""Draws the picture of docs/experts.md: python docs/make_experts.py"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
RANKS, EXPERTS, TOP = 2, 4, 2
CHOICES = (((0, 2), (1, 3), (0, 1), (2, 0)), ((3, 1), (0, 3), (2, 1), (3, 0)))
"""The experts of each rank's four tokens."""
CELL, LEFT, TOP_EDGE, COLUMN, ROW = 22, 90, 92, 250, 170

Use = tuple[int, int, int]
"""The rank and number of a token, and one of its experts."""


def columns() -> list[tuple[str, str, list[list[Use]]]]:
    """What each rank holds in each stage: a heading, what happens, and the uses of tokens in order."""
    own = [[(rank, t, e) for t, both in enumerate(CHOICES[rank]) for e in both] for rank in range(RANKS)]
    ordered = [sorted(uses, key=lambda u: u[2]) for uses in own]
    here = EXPERTS // RANKS
    arrived = [[u for uses in ordered for u in uses if u[2] // here == rank] for rank in range(RANKS)]
    grouped = [sorted(uses, key=lambda u: u[2]) for uses in arrived]
    return [
        ("tokens, twice each", "the router has chosen", own),
        ("sorted by expert", "all-to-all", ordered),
        ("arrived", "sorted again", arrived),
        ("one grouped product", "back, and weighted sums", grouped),
    ]


def experts_svg(title: str) -> str:
    """Each use of a token is a cell: its colour is the expert's, its text the token's."""
    parts = columns()
    width, height = LEFT + len(parts) * COLUMN, TOP_EDGE + RANKS * ROW
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="14">{title}</text>',
    ]
    for e in range(EXPERTS):
        out.append(f'<rect x="{LEFT + e * 150}" y="36" width="14" height="14" fill="{COLOURS[e]}"/>')
        out.append(f'<text x="{LEFT + e * 150 + 20}" y="48">expert {e}, on rank {e // (EXPERTS // RANKS)}</text>')
    for c, (heading, then, held) in enumerate(parts):
        x = LEFT + c * COLUMN
        out.append(f'<text x="{x}" y="{TOP_EDGE - 10}" font-weight="bold">{heading}</text>')
        for rank in range(RANKS):
            y = TOP_EDGE + rank * ROW
            if c == 0:
                out.append(f'<text x="10" y="{y + 16}">rank {rank}</text>')
            for i, (of, token, e) in enumerate(held[rank]):
                left, top = x + i % 6 * (CELL + 4), y + i // 6 * (CELL + 6)
                out.append(f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" rx="3" fill="{COLOURS[e]}"/>')
                out.append(
                    f'<text x="{left + CELL / 2:g}" y="{top + 15}" text-anchor="middle" fill="white" font-size="11">'
                    f"{'ab'[of]}{token}</text>"
                )
            rows = -(-len(held[rank]) // 6)
            middle = y + rows * (CELL + 6) + 16
            out.append(f'<text x="{x}" y="{middle}" fill="#555">→ {then}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def images() -> dict[Path, str]:
    return {
        HERE / "images" / "experts.svg": experts_svg("Dispatch and combine: 2 ranks, 4 tokens each, 2 of 4 experts")
    }


def main() -> None:
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
