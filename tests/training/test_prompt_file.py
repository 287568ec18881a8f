"""`weft generate --prompts`: answers to a file of prompts, in its order, continued after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Output

from weft.job.errors import JobError
from weft.training.generation import prompt_file
from weft.training.generation.prompt_file import read_prompts

STORIES = Path(__file__).parents[2] / "recipes" / "stories260K"
LINES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "id": 7},
    {"messages": [{"role": "user", "content": "Tell me a story."}], "id": 8},
    {"prompt": "The cat 猫", "topic": {"animal": True}},
    {"prompt": "One day"},
    {"prompt": "Tim and Sue"},
]
OPTIONS = ("--tokens", "6", "--batch", "2", "--template", "plain")


@pytest.fixture
def command(tmp_path: Path, in_process: Callable[..., Output]) -> Callable[..., Output]:
    """`weft generate published …` in a folder with an imported model and prompts.jsonl."""
    shutil.copytree(STORIES, tmp_path / "published")
    assert in_process(tmp_path, "import", "published").code == 0
    write(tmp_path / "prompts.jsonl", LINES)
    return lambda *words: in_process(tmp_path, "generate", "published", *words)


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_keep_order_and_fields_and_do_not_depend_on_batches_or_kills(
    tmp_path: Path, command: Callable[..., Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command("--prompts", "prompts.jsonl", *OPTIONS)
    assert (done.code, done.out) == (0, "prompts.answers.jsonl: 5 answers\n"), done.err
    assert done.err.splitlines() == ["2 of 5 lines", "4 of 5 lines", "5 of 5 lines"]
    answers = read(tmp_path / "prompts.answers.jsonl")
    assert [{k: v for k, v in line.items() if k != "text"} for line in answers] == LINES
    assert all(line["text"] for line in answers)
    assert "猫" in (tmp_path / "prompts.answers.jsonl").read_text(encoding="utf-8"), "written as it was"

    killed = prompt_file.Answerer.answer

    def until_the_third(self: Any, lines: Any, first: int) -> list[str]:
        if first >= 2:
            raise KeyboardInterrupt
        return killed(self, lines, first)

    monkeypatch.setattr(prompt_file.Answerer, "answer", until_the_third)
    assert command("--prompts", "prompts.jsonl", "--out", "again.jsonl", *OPTIONS).code == 130
    partial = tmp_path / "again.jsonl.partial"
    assert not (tmp_path / "again.jsonl").exists() and len(read(partial)) == 3
    with partial.open("a", encoding="utf-8") as file:
        file.write('{"prompt": "The c')  # cut off by a kill
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    again = command("--prompts", "prompts.jsonl", "--out", "again.jsonl", *OPTIONS[:3], "3", *OPTIONS[4:], "--json")
    assert json.loads(again.out) == {"path": "again.jsonl", "lines": 5, "continued_after": 2, "step": 0}
    assert read(tmp_path / "again.jsonl") == answers and not partial.exists()


def test_what_cannot_be_continued_or_written_is_refused(tmp_path: Path, command: Callable[..., Output]) -> None:
    partial = tmp_path / "a.jsonl.partial"
    ask = ("--prompts", "prompts.jsonl", "--out", "a.jsonl", *OPTIONS)
    assert command(*ask).code == 0
    assert command(*ask).err.endswith("--out a.jsonl exists already; name a new file, or delete it to generate again\n")
    answers = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "a.jsonl").unlink()
    settings = {"checkpoint": "runs/published/checkpoints/step-00000000", "tokens": 7}
    partial.write_text(json.dumps(settings) + "\n" + answers[0], encoding="utf-8")
    assert "a.jsonl.partial cannot be continued: it was begun with tokens=7, not 6; delete it" in command(*ask).err
    for options, text in {
        ("--prompts", "none.jsonl"): "--prompts none.jsonl: No such file or directory",
        ("--prompts", "prompts.jsonl", "--chat"): "--prompts answers a file; leave out --chat, or --prompts",
        ("--out", "a.jsonl"): "--out a.jsonl is for the answers to --prompts FILE",
    }.items():
        wrong = command(*options)
        assert wrong.code == 2 and text in wrong.err, wrong.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no lines; write one such as"),
        ("{", "line 1 of --prompts p.jsonl is not JSON"),
        ('\n{"id": 1}', "line 2 of --prompts p.jsonl must be an object with prompt or messages, one of them"),
        ('{"prompt": 1}', "line 1 of --prompts p.jsonl has a prompt of 1, which is not text"),
        ('{"prompt": "a", "text": "b"}', "line 1 of --prompts p.jsonl has a field 'text', in which the answer"),
        ('{"messages": [{"role": "me", "content": "a"}]}', "must have messages such as"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(JobError) as error:
        read_prompts(Path("p.jsonl"))
    assert message in str(error.value)
