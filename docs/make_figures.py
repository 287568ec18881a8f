"""Writes every generated table and output into the pages of docs/ and the README: python docs/make_figures.py

A page marks the place of a generated block; what is between the comments is replaced:

    <!-- made: faults -->
    …
    <!-- end -->

tests/docs/test_docs_figures.py fails if a page differs from what this script writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- made: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def faults() -> str:
    """The kinds of faults that `weft chaos` injects."""
    from weft.chaos.faults import KINDS

    return "\n".join(
        ["| kind | what happens |", "|---|---|", *(f"| `{name}` | {k.what} |" for name, k in KINDS.items())]
    )


BLOCKS: dict[str, Callable[[], str]] = {"faults": faults}
"""Each generated block by name; pages refer to it by that name."""


def pages() -> Iterator[Path]:
    """The pages with generated blocks."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if BLOCK.search(path.read_text(encoding="utf-8")):
            yield path


def page(text: str) -> str:
    """The page with its blocks made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    for path in pages():
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
