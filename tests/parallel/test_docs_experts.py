"""docs/experts.md: its picture is what the code draws now, and every token in it comes home."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("make_experts", DOCS / "make_experts.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def test_the_picture_is_up_to_date() -> None:
    text = (DOCS / "experts.md").read_text(encoding="utf-8")
    for path, picture in load().images().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name} is old: run python docs/make_experts.py"
        assert f"images/{path.name}" in text


def test_every_use_of_a_token_meets_its_expert() -> None:
    *_, (_, _, grouped) = load().columns()
    assert all(e // 2 == rank for rank, uses in enumerate(grouped) for _, _, e in uses)
    assert sum(len(uses) for uses in grouped) == 2 * 4 * 2
