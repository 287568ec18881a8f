"""docs/fewer-exchanges.md: its picture is what the code draws now, and it tells the truth about waiting."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("make_sync", DOCS / "make_sync.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def test_the_picture_is_up_to_date() -> None:
    text = (DOCS / "fewer-exchanges.md").read_text(encoding="utf-8")
    for path, picture in load().images().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name} is old: run python docs/make_sync.py"
        assert f"images/{path.name}" in text


def test_a_server_lets_the_fast_go_on() -> None:
    maker = load()
    together, _ = maker.every_step([1, 1, 3])
    apart, delivered, updates = maker.server([1, 1, 3], 4)
    assert len(together[0]) == 8 and len(apart[0]) == 24
    assert len(updates) * 3 <= len(delivered)
