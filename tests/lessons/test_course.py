"""Every lesson runs and predicts what it measures, every exercise knows right from wrong, and both languages agree."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.command import Output, weft
from helpers.docs_pages import maker

from weft.cli.lessons import check
from weft.cli.lessons.check import check_answers, load
from weft.cli.lessons.language import VARIABLE, messages
from weft.job.load import lessons
from weft.launch.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "lessons"
NAMES = list(lessons())
Run = Callable[..., Output]


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv(VARIABLE, "en")


def output_of(name: str, store: str, language: str) -> str:
    """What a rank prints in a lesson."""
    os.environ[VARIABLE] = language
    result = io.StringIO()
    with contextlib.redirect_stdout(result):
        lesson = load(lessons()[name])
        lesson.lesson(int(os.environ["RANK"]), store) if hasattr(lesson, "RANKS") else lesson.lesson()
    return result.getvalue()


EXACT = {  # rows whose predicted and measured figures are equal, by lesson
    "why_distributed": 5, "collectives": 9, "data_parallel": 3, "zero": 12, "tensor_parallel": 5, "ring_attention": 2,
    "pipeline": 8, "precision_and_memory": 10, "fewer_exchanges": 9, "faults": 7,
}  # fmt: skip
LAST_LINES = {
    "collectives": "All three sums equal the library's all-reduce. S is 33,792 bytes.",
    "data_parallel": "After 5 steps the weights of both equal those of one process.",
    "zero": "After 4 steps the weights of all stages equal those of one process.",
    "tensor_parallel": "Loss and gradients equal the single process's.",
    "ring_attention": "Output and gradients equal those of one process that has the whole sequence.",
    "pipeline": "The gradients of all three equal the single process's.",
    "experts": "Output and gradients equal those of one process that holds all experts.",
    "precision_and_memory": "The gradients of all three are equal, bit by bit.",
    "choosing_a_layout": "The fastest by hand: dp 4 · tp 2 · pp 1 · zero 1.",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_measures_what_it_predicts(pool: RankPool, tmp_path: Path, name: str) -> None:
    ranks = getattr(load(lessons()[name]), "RANKS", 1)
    first, *others = pool.run(output_of, ranks, name, str(tmp_path / "store"), "en")
    assert not any(others)
    lines = first.splitlines()
    assert any("Weft" in line for line in lines)
    cells = [re.split(r"\s{2,}", line) for line in lines]
    equal = [row for row in cells if len(row) == 3 and row[1] == row[2]]
    assert len(equal) >= EXACT.get(name, 0), first
    assert lines[-1] == LAST_LINES.get(name, lines[-1])


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_knows_right_from_wrong(tmp_path: Path, name: str) -> None:
    solution = FOLDER / "solutions" / f"{name}.py"
    count = len(load(FOLDER / "checks" / f"{name}.py").QUESTIONS)
    assert check_answers(name, solution) == (
        True, [*(f"✓ {f}" for f in functions(solution)), f"All {count} answers are right."],
    )  # fmt: skip
    passed, lines = check_answers(name, FOLDER / "exercises" / f"{name}.py")
    assert not passed and lines[-1] == f"0 of {count} answers are right."
    assert all("replace the ... by your answer." in line for line in lines[:-1])
    wrong = tmp_path / "wrong.py"
    wrong.write_text(re.sub(r"return (?=\S)", "return 2 * ", solution.read_text(encoding="utf-8")), encoding="utf-8")
    passed, lines = check_answers(name, wrong)
    assert not passed and lines[-1] == f"0 of {count} answers are right.", lines
    assert all(re.search(r" (gives .* is right|fails: \w+Error: .*)\. [A-Zlt]", line) for line in lines[:-1]), lines


def functions(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_is_short_and_complete(name: str) -> None:
    code = lessons()[name].read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 150
    assert "def with_weft(" in code
    texts = [(folder / f"{name}.md").read_text(encoding="utf-8") for folder in (FOLDER, FOLDER / "zh")]
    assert all(text.startswith(f"# {NAMES.index(name) + 1}. ") for text in texts)
    assert in_step(texts[0]) == in_step(texts[1])
    assert all(f"```bash\nweft lesson {name}{end}\n```" in text for text in texts for end in ("", " --check"))
    exercises = [folder / "exercises" / f"{name}.py" for folder in (FOLDER, FOLDER / "zh")]
    assert without_docstrings(exercises[0]) == without_docstrings(exercises[1])


def test_the_pages_of_the_course_are_in_step() -> None:
    course, chinese = (ROOT / "docs" / "course.md").read_text("utf-8"), (FOLDER / "zh" / "README.md").read_text("utf-8")
    assert in_step(course) == in_step(chinese)
    for path, (folder, link) in maker("course").PAGES.items():
        text = path.read_text(encoding="utf-8")
        assert maker("course").page(text, folder, link) == text, f"{path.name} is old: run python docs/make_course.py"


def in_step(text: str) -> dict[str, list[str]]:
    """What does not change with the language: headings by level, blocks, figures, code, names of pictures."""
    blocks = re.findall(r"^```[\s\S]*?^```$|^    .*$", text, re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "", text)
    return {
        "headings": re.findall(r"^#+", text, re.MULTILINE),
        "blocks": blocks,
        "figures": sorted(re.findall(r"\d[\d.,]*\d|\d", prose)),
        "code": sorted(re.findall(r"`[^`\n]+`", prose)),
        "pictures": re.findall(r"(\w[\w-]*\.svg)", text),
        "rows": [str(line.count("|")) for line in text.splitlines() if line.startswith("|")],
    }


def without_docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef):
            node.body = node.body[1:]
    return ast.dump(tree)


def sentences() -> Iterator[str]:
    """Every sentence that is translated when it is printed."""
    for path in [
        *FOLDER.glob("*.py"),
        *FOLDER.glob("checks/*.py"),
        *(ROOT / "weft" / "cli").glob("*/*.py"),
        ROOT / "weft/cli/machine.py",
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                first = {"t": node.args[:1], "say": node.args[:1], "Question": node.args[1:2], "show": node.args[1:]}
                for each in first.get(node.func.id, []):
                    parts = each.elts if isinstance(each, ast.Tuple) else [each]
                    yield from (str(p.value).strip("\n") for p in parts if isinstance(p, ast.Constant))


def test_every_message_is_translated_with_its_values() -> None:
    chinese = messages("zh")
    assert set(sentences()) <= chinese.keys()
    for english, translation in chinese.items():
        assert sorted(re.findall(r"\{.*?\}", english)) == sorted(re.findall(r"\{.*?\}", translation)), english
    constants = {
        str(node.value).strip("\n")
        for path in [*FOLDER.glob("**/*.py"), *(ROOT / "weft" / "cli").glob("**/*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
    }  # fmt: skip
    assert chinese.keys() <= constants


def test_a_lesson_prints_its_text_its_code_and_the_next(tmp_path: Path) -> None:
    result = weft(tmp_path, "lesson", "collectives", "--lang", "zh")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    text = (FOLDER / "zh" / "collectives.md").read_text(encoding="utf-8").splitlines()
    assert lines[: len(text)] == text and text[0] == "# 3. 集合通信：各个 rank 如何对话"
    files = [str(FOLDER / "zh" / "collectives.md"), str(FOLDER / "collectives.py")]
    assert lines[len(text) + 1 : len(text) + 3] == files
    assert "三种求和都与库的 all-reduce 一致。S 为 33,792 字节。" in lines
    assert lines[-2:] == [
        "练习： weft lesson collectives --check",
        "下一课： weft lesson data_parallel: 数据并行与大批量训练",
    ]


def test_check_writes_the_exercise_and_then_checks_it(tmp_path: Path, in_process: Run) -> None:
    file = tmp_path / "exercises" / "pipeline.py"
    first = in_process(tmp_path, "lesson", "pipeline", "--check")
    assert (first.code, first.out) == (
        1,
        "Wrote exercises/pipeline.py. Replace each ... in it, then run this command again.\n",
    )
    file.write_text((FOLDER / "solutions" / "pipeline.py").read_text(encoding="utf-8"), encoding="utf-8")
    done = in_process(tmp_path, "lesson", "pipeline", "--check", "--json")
    assert done.code == 0
    assert json.loads(done.out) == {
        "lesson": "pipeline", "passed": True, "messages": ["✓ bubble", "✓ kept", "All 2 answers are right."],
    }  # fmt: skip
    file.write_text("def bubble(ranks, microbatches):\n    return ranks / microbatches\n", encoding="utf-8")
    wrong = in_process(tmp_path, "lesson", "pipeline", "--check")
    assert wrong.code == 1
    assert wrong.out.splitlines() == [
        "✗ bubble: bubble(4, 16) gives 0.25; 0.15789473684210525 is right. Every rank waits for ranks - 1 "
        "microbatches; a step takes as long as microbatches + ranks - 1 of them.",
        "✗ kept: the file has no function kept; write it again as in the exercise.",
        "0 of 2 answers are right.",
    ]


def test_a_broken_or_endless_answer_is_named(tmp_path: Path, in_process: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "exercises" / "links.py"
    file.parent.mkdir()
    file.write_text("def message_seconds(size, latency, bandwidth)\n", encoding="utf-8")
    assert "links.py cannot be run: SyntaxError: expected ':'" in in_process(tmp_path, "lesson", "links", "--check").out
    file.write_text("while True:\n    pass\n", encoding="utf-8")
    monkeypatch.setattr(check, "TIME_LIMIT_S", 0.5)
    ended = in_process(tmp_path, "lesson", "links", "--check", "--lang", "zh")
    assert (ended.code, ended.out) == (1, "exercises/links.py 运行超过 0 秒；请检查是否有不会结束的循环。\n")


def test_lessons_are_listed_in_learning_order(tmp_path: Path, in_process: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = in_process(tmp_path, "lesson").out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert lines[7] == "pipeline              Pipelines"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert in_process(tmp_path, "lesson").out.splitlines()[7] == "pipeline              流水线并行"
    assert {f"{name}.py" for name in NAMES} == {path.name for path in FOLDER.glob("*.py")}
    for args, message in (
        (("pipelin",), f"unknown lesson 'pipelin'; lessons: {', '.join(NAMES)}"),
        (("pipeline", "--lang", "fr"), "the lessons are in en and zh, not in 'fr'"),
        (("--check",), "--check needs the name of a lesson; weft lesson lists them"),
    ):
        refused = in_process(tmp_path, "lesson", *args)
        assert (refused.code, refused.last) == (2, f"weft: {message}")


def commands() -> list[str]:
    texts = [(FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in NAMES]
    return [c for text in texts for c in re.findall(r"```bash\n(.*)\n```", text) if not c.startswith("weft lesson")]


def test_the_commands_of_the_texts_work(tmp_path: Path, in_process: Run) -> None:
    planned = [command for command in commands() if command.startswith("weft plan ")]
    others = [command for command in commands() if command not in planned]
    assert len(planned) >= 9 and len(others) == 3
    for command in planned:
        result = in_process(tmp_path, *shlex.split(command)[1:])
        assert result.code == 0, f"{command}: {result.err}"
    for command in others:
        result = weft(tmp_path, *shlex.split(command)[1:])
        assert result.code in ((0, 4) if command == "weft doctor" else (0,)), f"{command}: {result.err}"
