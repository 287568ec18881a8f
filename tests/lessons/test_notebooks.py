"""The notebooks are those of the lessons, and all of their cells run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import python
from helpers.docs_pages import maker

ROOT = Path(__file__).resolve().parents[2]
NAMES = maker("notebooks").NAMES


def test_notebooks_are_those_of_the_lessons() -> None:
    notebooks = maker("notebooks").notebooks()
    assert len(notebooks) == 2 * len(NAMES)
    for path, text in notebooks.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: run python docs/make_notebooks.py"
    assert set(notebooks) == set((ROOT / "notebooks").rglob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_languages_have_the_same_code(name: str) -> None:
    books = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "notebooks").rglob(f"{name}.ipynb"))
    ]
    code = [["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"] for book in books]
    assert [c for c in code[0][1:] if '"""' not in c] == [c for c in code[1][1:] if '"""' not in c]
    assert [c["cell_type"] for c in books[0]["cells"]] == [c["cell_type"] for c in books[1]["cells"]]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs(tmp_path: Path, name: str) -> None:
    book = json.loads(
        (ROOT / "notebooks" / ("zh" if name == "zero" else "") / f"{name}.ipynb").read_text(encoding="utf-8")
    )
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    code[-2] = (ROOT / "lessons" / "solutions" / f"{name}.py").read_text(encoding="utf-8")  # in place of the exercise
    (tmp_path / "cells.py").write_text("\n\n".join(code), encoding="utf-8")
    done = python(tmp_path, "cells.py")
    assert done.code == 0, done.err
    last = "全部 2 个答案正确。" if name == "zero" else "All 2 answers are right."
    assert done.out.splitlines()[-1] == last
    assert "Weft" in done.out
