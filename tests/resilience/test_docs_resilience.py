"""docs/resilience.md: its picture is what the code draws now, and its menu the one that `weft chaos` has."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from weft.resilience.faults import KINDS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_picture_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_resilience", DOCS / "make_resilience.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    text = (DOCS / "resilience.md").read_text(encoding="utf-8")
    for path, picture in maker.images().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name} is old: run python docs/make_resilience.py"
        assert f"images/{path.name}" in text


def test_the_menu_is_complete() -> None:
    text = (DOCS / "resilience.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        assert rows[name].replace("`", "").startswith(kind.what)
