"""The generated blocks of the pages are what docs/make_figures.py writes now."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.docs_pages import maker

FIGURES = maker("figures")


@pytest.mark.parametrize("path", list(FIGURES.pages()), ids=lambda p: p.name)
def test_generated_blocks_are_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert FIGURES.page(text) == text, f"{path.name} is out of date: run python docs/make_figures.py"


def test_every_block_is_used() -> None:
    used = {found[2] for path in FIGURES.pages() for found in FIGURES.BLOCK.finditer(path.read_text(encoding="utf-8"))}
    assert used == FIGURES.BLOCKS.keys()


def test_the_worked_example_has_the_layout_that_its_text_derives() -> None:
    assert "layout     dp_shard 8 (zero 1)\n" in FIGURES.plan_seven()
