"""docs/contributing.md names files that exist, every kind of entry, and every package."""

from __future__ import annotations

import re

from helpers.docs_pages import DOCS, maker, text_of

ROOT = DOCS.parent
TWO_SCREENS = 100
"""Lines of a terminal or an editor."""


def test_the_page_is_short() -> None:
    assert len(text_of("contributing").splitlines()) <= TWO_SCREENS


def test_the_files_exist() -> None:
    named = re.findall(r"`((?:weft|tests|docs|recipes|bench)/[\w./-]+)`", text_of("contributing"))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert len(named) > 30 and not missing, f"{', '.join(missing)} moved; update docs/contributing.md"


def test_every_registry_of_the_core_is_named() -> None:
    """By the class of its entries, or the file that defines it."""
    page = text_of("contributing")
    for path in (ROOT / "weft").rglob("*.py"):
        if "extensions" in path.parts:
            continue
        for entry in re.findall(r"^[A-Z_]+: Registry\[(\w+)\] = ", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert entry in page or path.relative_to(ROOT).as_posix() in page or entry == "Any", f"{path}: {entry}"


def test_the_picture_shows_every_package() -> None:
    drawn = maker("contributing")
    named = {part for *_, parts in (*drawn.FLOW, *drawn.AROUND) for part in parts} | {"extensions"}
    packages = {p.parent.name for p in (ROOT / "weft").glob("*/__init__.py")} | {"mesh.py", "precision.py"}
    assert named == packages
