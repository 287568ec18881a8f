"""Writes the notebooks of six lessons from their texts, code and exercises: python docs/make_notebooks.py"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LESSONS, NOTEBOOKS = ROOT / "lessons", ROOT / "notebooks"
NAMES = ("why_distributed", "collectives", "data_parallel", "zero", "pipeline", "choosing_a_layout")
LANGUAGES = ("en", "zh")
RUN = """with tempfile.TemporaryDirectory() as folder:  # a fork, because the functions are only in this notebook
    mp.start_processes(lesson, args=(f"{folder}/store",), nprocs=RANKS, start_method="fork")
"""


def code_cells(source: str) -> list[str]:
    """The imports and constants, a cell for each function or class, and one that runs the lesson."""
    tree = ast.parse(source)
    lines = source.splitlines()
    cells: list[list[str]] = [[]]
    for node in tree.body[1:-1]:  # without the docstring and `if __name__ == "__main__"`
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        while lines[first - 2].startswith("#"):
            first -= 1
        text = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            cells += [[text], []]
        else:
            cells[-1].append(text)
    run = RUN if "mp.spawn(" in source else "lesson()\n"
    return ["\n".join(cell) + "\n" for cell in cells if cell and cell != ["from __future__ import annotations"]] + [run]


def text_cells(text: str) -> tuple[list[str], str]:
    """The sections before the commands, and the one about the exercise."""
    text = re.sub(r"\]\((?:\.\./)+docs/", "](https://raw.githubusercontent.com/weft-train/weft/main/docs/", text)
    sections = re.split(r"(?m)^(?=## )", text)
    run = next(i for i, section in enumerate(sections) if "weft lesson" in section)
    return [*sections[:run], re.sub(r"```bash\n.*?```\n\n?", "", sections[run], flags=re.DOTALL)], re.sub(
        r"\n```bash\n.*?```\n", "", sections[-1], flags=re.DOTALL
    )


def notebook(name: str, language: str) -> str:
    """The notebook as a file: nbformat 4, without outputs."""
    base = LESSONS if language == "en" else LESSONS / language
    texts, about_exercise = text_cells((base / f"{name}.md").read_text(encoding="utf-8"))
    code = code_cells((LESSONS / f"{name}.py").read_text(encoding="utf-8"))
    exercise = (base / "exercises" / f"{name}.py").read_text(encoding="utf-8").split('"""\n', 1)[1].strip("\n")
    check = f'from weft.cli.lessons.check import check_notebook\n\ncheck_notebook("{name}", globals())'
    start = f'import os\n\nos.environ["WEFT_LANG"] = "{language}"'
    cells = [("markdown", text) for text in texts[:-1]]
    cells += [("code", start), *(("code", cell) for cell in code[:-1]), ("markdown", texts[-1]), ("code", code[-1])]
    cells += [("markdown", about_exercise), ("code", exercise), ("code", check)]
    book = {
        "cells": [_cell(kind, text.strip("\n"), f"{name}-{i}") for i, (kind, text) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(book, ensure_ascii=False, indent=1) + "\n"


def _cell(kind: str, text: str, name: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


def notebooks() -> dict[Path, str]:
    """Every notebook and its contents."""
    folders = {"en": NOTEBOOKS, "zh": NOTEBOOKS / "zh"}
    return {folders[lang] / f"{name}.ipynb": notebook(name, lang) for lang in LANGUAGES for name in NAMES}


def main() -> None:
    for path, text in notebooks().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
