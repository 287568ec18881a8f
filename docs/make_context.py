"""Draws the pictures of docs/context.md: python docs/make_context.py"""

from __future__ import annotations

from pathlib import Path

from svg_style import begin_svg

from weft.planner.time.context import chunks_of, sees

HERE = Path(__file__).parent
RANKS = 4
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
CELL, GAP, LEFT, TOP = 13, 26, 150, 62


def ring_svg(halves: int, title: str) -> str:
    """Every rank at every hop: which keys it holds, and which blocks of the score matrix it computes with them."""
    chunks = RANKS * halves
    side = chunks * CELL
    width, height = LEFT + RANKS * (side + GAP) + 10, TOP + RANKS * (side + GAP + 16) + 10
    out = begin_svg(width, height, title)
    for hop in range(RANKS):
        x = LEFT + hop * (side + GAP)
        out.append(f'<text x="{x}" y="{TOP - 22}">{"own keys" if hop == 0 else f"hop {hop}"}</text>')
    for rank in range(RANKS):
        y = TOP + rank * (side + GAP + 16)
        mine = chunks_of(rank, RANKS, halves)
        out.append(f'<text x="10" y="{y + 14}" class="c{rank}" font-weight="bold">rank {rank}</text>')
        out.append(f'<text x="10" y="{y + 30}">queries {" and ".join(map(str, mine))}</text>')
        for hop in range(RANKS):
            x, of = LEFT + hop * (side + GAP), (rank - hop) % RANKS
            theirs = chunks_of(of, RANKS, halves)
            sent = [j for j in theirs if any(sees(i, j, True) for i in mine)]
            held = " and ".join(map(str, sent)) or "none"
            out.append(f'<text x="{x}" y="{y - 4}" class="c{of}">keys {held}</text>')
            for i in range(chunks):
                for j in range(chunks):
                    fill = 'class="pale faint"' if sees(i, j, True) else 'class="page faint"'
                    computed = i in mine and j in theirs and sees(i, j, True)
                    if computed:
                        fill = f'class="faint" fill="{COLOURS[of]}"'
                    where = f'x="{x + j * CELL}" y="{y + i * CELL}" width="{CELL}" height="{CELL}"'
                    out.append(f'<rect {where} {fill} stroke-width="0.5"/>')
                    if i == j and computed:
                        a, b, c, d = x + j * CELL, y + i * CELL, x + (j + 1) * CELL, y + (i + 1) * CELL
                        out.append(f'<path d="M{a} {b}L{c} {d}L{c} {b}Z" class="page"/>')
    return "\n".join([*out, "</svg>"]) + "\n"


def images() -> dict[Path, str]:
    return {
        HERE / "images" / "ring-zigzag.svg": ring_svg(
            2, "A ring of 4 ranks, 8 chunks: every rank computes in every hop"
        ),
        HERE / "images" / "ring-in-order.svg": ring_svg(
            1, "The same with the sequence in order: rank 0 waits, rank 3 computes"
        ),
    }


def main() -> None:
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
