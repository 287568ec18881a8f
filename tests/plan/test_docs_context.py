"""docs/context.md: its pictures are what the code draws now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_pictures_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_context", DOCS / "make_context.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    text = (DOCS / "context.md").read_text(encoding="utf-8")
    for path, picture in maker.images().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name} is old: run python docs/make_context.py"
        assert f"images/{path.name}" in text
