"""docs/contributing.md names files that exist, and covers the typical changes."""

from __future__ import annotations

import re

import pytest
from helpers.docs_pages import DOCS, maker, text_of

ROOT = DOCS.parent
ROWS = re.findall(r"^\| (?!I want|---)(.+?) \| (.+) \|$", text_of("contributing"), re.MULTILINE)
TYPICAL = (
    "optimizer", "pipeline schedule", "device", "job field", "fault detector", "compressor", "model family", "command",
    "checkpoint format", "progress line", "launcher", "cost of all-to-all",
)  # fmt: skip


def test_every_typical_change_is_there() -> None:
    assert len(ROWS) >= 20
    for what in TYPICAL:
        assert any(what in subject for subject, _ in ROWS), f"no row about {what}"


@pytest.mark.parametrize(("subject", "files"), ROWS)
def test_the_files_of_a_change_exist(subject: str, files: str) -> None:
    named = re.findall(r"`((?:weft|tests|docs|recipes|bench)/[\w./-]+)`", files)
    assert named, f"{subject}: no file is named"
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"{subject}: {', '.join(missing)} moved; update docs/contributing.md"


def test_the_picture_shows_every_package() -> None:
    drawn = maker("contributing")
    named = {part for *_, parts in (*drawn.FLOW, *drawn.AROUND) for part in parts}
    packages = {p.parent.name for p in (ROOT / "weft").glob("*/__init__.py")} | {"mesh.py", "precision.py"}
    assert named == packages
