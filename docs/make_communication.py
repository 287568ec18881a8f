"""Draws the pictures of docs/communication.md: python docs/make_communication.py"""

from __future__ import annotations

from pathlib import Path

from svg_style import begin_svg

from weft.comm.algorithms import ring_places
from weft.comm.compression import adaptive

HERE = Path(__file__).parent
RANKS = 4
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
CELL, GAP, LEFT, TOP = 30, 26, 70, 70


def ring_steps() -> list[tuple[list[list[set[int]]], list[int | None]]]:
    """Before each step: the ranks whose numbers are in each shard of each rank; and the shard that each rank sends."""
    held = [[{rank} for _ in range(RANKS)] for rank in range(RANKS)]
    steps: list[tuple[list[list[set[int]]], list[int | None]]] = []
    for phase in range(2):
        for step in range(RANKS - 1):
            sent = [ring_places(rank + phase, step, RANKS)[0] for rank in range(RANKS)]
            steps.append(([[set(p) for p in pieces] for pieces in held], list(sent)))
            before = [[set(p) for p in pieces] for pieces in held]
            for rank, piece in enumerate(sent):
                to = (rank + 1) % RANKS
                held[to][piece] = before[rank][piece] | (set() if phase else before[to][piece])
    steps.append((held, [None] * RANKS))
    return steps


def ring_svg(title: str) -> str:
    """Every rank before every step: each shard in four strips, one for each rank whose numbers are in it."""
    steps = ring_steps()
    side = RANKS * CELL
    width, height = LEFT + len(steps) * (side + GAP), TOP + RANKS * (CELL + GAP) + 30
    out = begin_svg(width, height, title)
    for i, (held, sent) in enumerate(steps):
        x = LEFT + i * (side + GAP)
        phase = "reduce-scatter" if i < RANKS - 1 else "all-gather"
        head = "done" if i == len(steps) - 1 else f"{phase} {i % (RANKS - 1) + 1}"
        out.append(f'<text x="{x}" y="{TOP - 16}">{head}</text>')
        for rank in range(RANKS):
            y = TOP + rank * (CELL + GAP)
            if i == 0:
                out.append(f'<text x="10" y="{y + 19}" class="c{rank}" font-weight="bold">rank {rank}</text>')
            for piece in range(RANKS):
                left = x + piece * CELL
                for of in sorted(held[rank][piece]):
                    where = f'x="{left + of * CELL / RANKS:g}" y="{y}" width="{CELL / RANKS:g}" height="{CELL}"'
                    out.append(f'<rect {where} fill="{COLOURS[of]}"/>')
                out.append(f'<rect x="{left}" y="{y}" width="{CELL}" height="{CELL}" fill="none" class="faint"/>')
            piece_sent = sent[rank]
            if piece_sent is not None:
                left, down = x + piece_sent * CELL, y + CELL
                out.append(
                    f'<rect x="{left}" y="{y}" width="{CELL}" height="{CELL}" fill="none" class="ink" '
                    'stroke-width="2.5"/>'
                )
                middle = left + CELL / 2
                out.append(
                    f'<path d="M{middle:g} {down + 3}V{down + GAP - 7}m-4 -5l4 5l4 -5" fill="none" class="ink" '
                    'stroke-width="1.5"/>'
                )
    return "\n".join([*out, "</svg>"]) + "\n"


SETTINGS = ("none", "fp16", "bf16", "int8", "int4", "onebit", "topk:0.01", "powersgd:4")
NUMBERS, SIDE, BAR = 2**20, 1024, 460


def sent_bits(setting: str) -> float:
    """Bits for each number of a 1024 × 1024 gradient that a rank of two sends to sum it."""
    if setting.startswith("powersgd"):
        return 32 * int(setting.partition(":")[2]) * 2 * SIDE / NUMBERS
    return 8 * adaptive.sent_bytes(setting, NUMBERS, 2, scattered=False) / NUMBERS


def compression_svg(title: str) -> str:
    """One bar a setting."""
    height = 50 + 26 * len(SETTINGS)
    out = begin_svg(680, height, title)
    for i, setting in enumerate(SETTINGS):
        y, bits = 38 + 26 * i, sent_bits(setting)
        wide = max(1.0, BAR * bits / 32)
        less = f", {32 / bits:.0f}× less" if bits < 32 else ""
        out.append(f'<text x="10" y="{y + 14}">{setting}</text>')
        out.append(f'<rect x="100" y="{y}" width="{wide:.1f}" height="18" fill="{COLOURS[i % 4]}"/>')
        out.append(f'<text x="{106 + wide:.1f}" y="{y + 14}">{bits:.2f} bits{less}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def images() -> dict[Path, str]:
    return {
        HERE / "images" / "ring-all-reduce.svg": ring_svg("Ring all-reduce: 4 ranks, 4 shards; framed shards are sent"),
        HERE / "images" / "compression.svg": compression_svg(
            "What a rank of two sends for each number of a 1024 × 1024 gradient"
        ),
    }


def main() -> None:
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
