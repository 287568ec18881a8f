"""The lessons as a course: titles, texts, and the lesson that comes next."""

from __future__ import annotations

from pathlib import Path

from weft.cli.lessons.language import language
from weft.job.load import lessons, lessons_folder


def text_file(name: str) -> Path:
    """The text of a lesson in the chosen language."""
    folder = lessons_folder() if language() == "en" else lessons_folder() / language()
    return folder / f"{name}.md"


def title(name: str) -> str:
    """The first heading of the lesson's text, without its number."""
    with text_file(name).open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip().split(". ", 1)[-1]


def next_lesson(name: str) -> str | None:
    """The name of the lesson after this one; None after the last."""
    names = list(lessons())
    return next(iter(names[names.index(name) + 1 :]), None)
