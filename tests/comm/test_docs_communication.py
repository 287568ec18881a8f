"""docs/communication.md: its picture is what the code draws now, and it says what the ring does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("make_communication", DOCS / "make_communication.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def test_the_picture_is_up_to_date() -> None:
    text = (DOCS / "communication.md").read_text(encoding="utf-8")
    for path, picture in load().images().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name} is old: run python docs/make_communication.py"
        assert f"images/{path.name}" in text


def test_the_drawn_ring_ends_with_all_numbers_everywhere() -> None:
    steps = load().ring_steps()
    everybody = {0, 1, 2, 3}
    assert [[piece == everybody for piece in pieces] for pieces in steps[3][0]] == [
        [rank == piece for piece in range(4)] for rank in range(4)
    ]
    assert all(piece == everybody for pieces in steps[-1][0] for piece in pieces)
