"""Draws the picture of docs/contributing.md: python docs/make_contributing.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
FLOW = (
    ("Job", "what to train", ("job",)),
    ("Plan", "the layout", ("planner", "hardware")),
    ("Mesh", "the ranks", ("mesh.py",)),
    ("Model", "the maths", ("models", "precision.py")),
    ("apply", "spread it", ("parallel", "comm", "memory")),
    ("train", "the loop", ("training", "data", "optim")),
    ("run folder", "the results", ("checkpoint", "watch")),
)
"""Each step of the flow, what it is, and the parts of weft/ that implement it."""
AROUND = (
    ("starts a run", ("cli", "launch")),
    ("keeps it running", ("supervisor", "guards", "wire")),
    ("checks and measures", ("verify", "measure")),
)
EXTENSIONS = tuple(sorted(p.parent.name for p in (HERE.parent / "weft" / "extensions").glob("*/__init__.py")))
BOX, GAP, LEFT, TOP = 112, 18, 14, 14
LETTER, BETWEEN = 7.3, "  ·  "
"""Width of a letter of the packages' font."""
STYLE = """text{font:14px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.b{font-weight:600}.s{font-size:12px;fill:#59636e}.p{font:12px ui-monospace,Menlo,Consolas,monospace}
.m{text-anchor:middle}.box{fill:none;stroke:#8c959f;stroke-width:1.2}.line{stroke:#8c959f;stroke-width:1.4;fill:none}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}}"""


def wrapped(names: Sequence[str], width: float) -> list[list[str]]:
    """The names in lines that fit the width."""
    lines: list[list[str]] = [[]]
    for name in names:
        if lines[-1] and LETTER * len(BETWEEN.join([*lines[-1], name])) > width:
            lines.append([])
        lines[-1].append(name)
    return lines


def flow() -> str:
    """The steps in a row with their packages below, and the packages around them in a second row."""
    width = 2 * LEFT + len(FLOW) * BOX + (len(FLOW) - 1) * GAP
    out = []
    for i, (name, what, parts) in enumerate(FLOW):
        x = LEFT + i * (BOX + GAP)
        middle = x + BOX // 2
        out.append(f'<rect x="{x}" y="{TOP}" width="{BOX}" height="52" rx="8" class="box"/>')
        out.append(f'<text x="{middle}" y="{TOP + 23}" class="b m">{name}</text>')
        out.append(f'<text x="{middle}" y="{TOP + 41}" class="s m">{what}</text>')
        if i:
            out.append(f'<path d="M{x - GAP + 2} {TOP + 26}L{x - 3} {TOP + 26}" class="line" marker-end="url(#a)"/>')
        for row, part in enumerate(parts):
            out.append(f'<text x="{middle}" y="{TOP + 76 + 18 * row}" class="p m">{part}</text>')
    top, wide = TOP + 142, (width - 2 * LEFT - 2 * GAP) // 3
    for i, (what, parts) in enumerate(AROUND):
        x = LEFT + i * (wide + GAP)
        out.append(f'<rect x="{x}" y="{top}" width="{wide}" height="52" rx="8" class="box"/>')
        out.append(f'<text x="{x + wide // 2}" y="{top + 22}" class="s m">{what}</text>')
        out.append(f'<text x="{x + wide // 2}" y="{top + 41}" class="p m">{BETWEEN.join(parts)}</text>')
    lines = wrapped(EXTENSIONS, width - 2 * LEFT - 2 * GAP)
    top, tall = top + 52 + GAP, 34 + 18 * len(lines)
    out.append(f'<rect x="{LEFT}" y="{top}" width="{width - 2 * LEFT}" height="{tall}" rx="8" class="box"/>')
    out.append(f'<text x="{width // 2}" y="{top + 22}" class="s m">extensions: each registers entries</text>')
    for row, names in enumerate(lines):
        out.append(f'<text x="{width // 2}" y="{top + 41 + 18 * row}" class="p m">{BETWEEN.join(names)}</text>')
    height = top + tall + TOP
    arrow = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#8c959f"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">\n<title>The flow of a run and the packages of weft/</title>'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", arrow, *out, "</svg>"]) + "\n"


def images() -> dict[Path, str]:
    return {HERE / "images" / "packages.svg": flow()}


if __name__ == "__main__":
    for path, text in images().items():
        path.write_text(text, encoding="utf-8")
