"""The pictures of docs/ are what the code draws now, and the Python of its pages runs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.command import python
from helpers.docs_pages import DOCS, maker, python_of, text_of

DRAWN = [p.stem.removeprefix("make_") for p in sorted(DOCS.glob("make_*.py")) if "def images(" in p.read_text("utf-8")]
PAGES = {"sync": "fewer-exchanges", "curves": "precision", "tiers": "memory-tiers"}
"""The page with a script's pictures, if its name differs."""


@pytest.mark.parametrize("name", DRAWN)
def test_the_pictures_are_up_to_date(name: str) -> None:
    text = text_of(PAGES.get(name, name))
    images = maker(name).images()
    assert images
    for path, picture in images.items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name} is old: run python docs/make_{name}.py"
        assert f"images/{path.name}" in text


@pytest.mark.parametrize("path", sorted((DOCS / "images").glob("*.svg")), ids=lambda p: p.stem)
def test_a_picture_follows_dark_mode_and_its_texts_are_inside(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert "prefers-color-scheme:dark" in "".join(root.itertext()).replace(" ", "")
    width = float((root.get("viewBox") or "").split()[2])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if "transform" in text.attrib:
            continue
        letters = 5.4 * len("".join(text.itertext())) * float(text.get("font-size", 12)) / 12
        middle = "m" in (text.get("class") or "").split() or text.get("text-anchor") == "middle"
        end = float(text.get("x", 0)) + (letters / 2 if middle else 0 if text.get("text-anchor") == "end" else letters)
        assert end <= width + 1 or "e" in (text.get("class") or "").split(), "".join(text.itertext())


@pytest.mark.parametrize(
    ("page", "block"), [(p, b) for p in ("data", "pipeline", "your-own-code") for b in range(len(python_of(p)))]
)
def test_a_block_runs(tmp_path: Path, page: str, block: int) -> None:
    script = tmp_path / "block.py"
    script.write_text(python_of(page)[block], encoding="utf-8")
    done = python(tmp_path, str(script))
    assert done.code == 0, done.err
