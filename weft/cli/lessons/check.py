"""`weft lesson NAME --check`: write the exercise of a lesson, or check the learner's answers to it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from weft.cli.lessons.language import VARIABLE, language, t
from weft.cli.lessons.question import Question
from weft.job.load import lessons_folder

TIME_LIMIT_S = 60.0


def check_lesson(name: str) -> tuple[bool, list[str]]:
    """Whether all answers of exercises/NAME.py are right, and what to tell the learner.

    If there is no such file, the exercise is written there. The answers run in a process of their own, which is ended
    after TIME_LIMIT_S.
    """
    file = Path("exercises") / f"{name}.py"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(exercise(name).read_text(encoding="utf-8"), encoding="utf-8")
        return False, [t("Wrote {file}. Replace each ... in it, then run this command again.", file=file)]
    command = [sys.executable, "-m", "weft.cli.lessons.check", name, str(file)]
    environment = {**os.environ, VARIABLE: language(), "PYTHONUTF8": "1"}
    try:
        ended = subprocess.run(
            command, check=False, capture_output=True, encoding="utf-8", env=environment, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        text = t(
            "{file} ran for more than {limit:.0f} s; look for a loop that does not end.", file=file, limit=TIME_LIMIT_S
        )
        return False, [text]
    lines = ended.stdout.splitlines() or ended.stderr.splitlines()[-1:]
    return ended.returncode == 0, lines


def exercise(name: str) -> Path:
    """The exercise of a lesson in the chosen language."""
    folder = lessons_folder() if language() == "en" else lessons_folder() / language()
    return folder / "exercises" / f"{name}.py"


def check_answers(name: str, file: Path) -> tuple[bool, list[str]]:
    """Check a file of answers in this process."""
    try:
        answers = load(file)
    except Exception as error:  # whatever the learner's file does
        reason = f"{type(error).__name__}: {error}"
        return False, [t("{file} cannot be run: {reason}", file=file, reason=reason)]
    return check_functions(name, vars(answers))


def check_notebook(name: str, names: Mapping[str, object]) -> None:
    """Check the answers that a notebook has defined and print what is wrong."""
    print(*check_functions(name, names)[1], sep="\n")


def check_functions(name: str, names: Mapping[str, object]) -> tuple[bool, list[str]]:
    """Check functions by name: whether all are right, a line for each question, and a last line."""
    questions: tuple[Question, ...] = load(lessons_folder() / "checks" / f"{name}.py").QUESTIONS
    wrong = {question.name: question.wrong(names.get(question.name)) for question in questions}
    lines = [f"✗ {name_}: {reason}" if reason else f"✓ {name_}" for name_, reason in wrong.items()]
    right = sum(reason is None for reason in wrong.values())
    last = "All {count} answers are right." if right == len(wrong) else "{right} of {count} answers are right."
    return right == len(wrong), [*lines, t(last, right=right, count=len(wrong))]


def load(file: Path) -> ModuleType:
    """The module of a file, run under its own name."""
    spec = importlib.util.spec_from_file_location(f"lesson_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    passed, text = check_answers(sys.argv[1], Path(sys.argv[2]))
    print(*text, sep="\n")
    sys.exit(not passed)
