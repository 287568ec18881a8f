"""Answers to a file of prompts: JSON lines in, JSON lines out, in batches; a run that was killed continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.format import SavedCheckpoint
from weft.data.chat.conversations import ConversationEncoder
from weft.data.sources import open_tokenizer
from weft.job.errors import JobError, describe_file_error
from weft.job.schema import Job
from weft.training.chat import Chat, open_template
from weft.training.export import load_model
from weft.training.generate import Sampling, continue_tokens, end_tokens

ANSWER = "text"
"""Field of a line that gets the answer."""
ROLES = ("system", "user", "assistant", "tool")
PARTIAL = ".partial"
"""Ending of the file that holds the answers until all are there. Its first line has the settings."""

Line = dict[str, Any]


def read_prompts(path: Path) -> list[Line]:
    """The lines of a file, each with a prompt or with messages, and with other fields that are kept."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise JobError(f"--prompts {path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise JobError(f"--prompts {describe_file_error(error)}") from None
    lines = [_read_line(f"line {i} of --prompts {path}", text) for i, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise JobError(f'--prompts {path} has no lines; write one such as {{"prompt": "Once upon a time"}}')
    return lines


def _read_line(where: str, text: str) -> Line:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{where} is not JSON: {error}") from None
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise JobError(f"{where} must be an object with prompt or messages, one of them")
    if ANSWER in line:
        raise JobError(f"{where} has a field {ANSWER!r}, in which the answer is written; rename it")
    if "prompt" in line and not isinstance(line["prompt"], str):
        raise JobError(f"{where} has a prompt of {json.dumps(line['prompt'])[:40]}, which is not text")
    if "messages" in line and not _are_messages(line["messages"]):
        raise JobError(f'{where} must have messages such as [{{"role": "user", "content": "Hello"}}]')
    return line


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in value)
    )


@dataclass(frozen=True)
class Answers:
    """A file of answers while it is written: FILE.partial, which becomes FILE when all answers are there."""

    out: Path
    settings: Line
    """What the answers depend on besides the prompts."""

    @property
    def partial(self) -> Path:
        return self.out.with_name(self.out.name + PARTIAL)

    def begin(self, prompts: Sequence[Line]) -> int:
        """Continue a file of the same prompts and settings, or begin a new one. Returns how many answers it has."""
        if self.out.exists():
            raise JobError(f"--out {self.out} exists already; name a new file, or delete it to generate again")
        begun = self.partial.read_bytes() if self.partial.exists() else b""
        whole, _, _ = begun.rpartition(b"\n")  # a line that a kill cut off is written again
        if not whole:
            self.partial.write_text(_dumps(self.settings) + "\n", encoding="utf-8")
            return 0
        first, *answers = whole.decode().split("\n")
        self._check_settings(json.loads(first))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=False), 1):
            given = {key: value for key, value in json.loads(answer).items() if key != ANSWER}
            if given != prompt:
                raise self._other(f"line {number} of the prompts has changed")
        if len(answers) > len(prompts):
            raise self._other(f"it has {len(answers)} answers to {len(prompts)} prompts")
        with self.partial.open("r+b") as file:
            file.truncate(len(whole) + 1)
        return len(answers)

    def _check_settings(self, before: Line) -> None:
        for key, value in self.settings.items():
            if before.get(key) != value:
                raise self._other(f"it was begun with {key}={_dumps(before.get(key))}, not {_dumps(value)}")

    def _other(self, why: str) -> JobError:
        return JobError(f"{self.partial} cannot be continued: {why}; delete it to begin again, or give another --out")

    def add(self, lines: Sequence[Line]) -> None:
        with self.partial.open("a", encoding="utf-8") as file:
            file.write("".join(_dumps(line) + "\n" for line in lines))

    def finish(self) -> None:
        """Put the answers, without the settings, in place."""
        _, _, answers = self.partial.read_text(encoding="utf-8").partition("\n")
        whole = self.out.with_name(self.out.name + ".new")
        whole.write_text(answers, encoding="utf-8")
        whole.replace(self.out)
        self.partial.unlink()


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def answer_file(
    found: SavedCheckpoint, job: Job, prompts: Sequence[Line], out: Path, tokens: int, sampling: Sampling, *,
    batch: int, ema: bool = False, template: str | None = None, report: Callable[[int, int], None] | None = None,
) -> int:  # fmt: skip
    """Answer every line, `batch` lines at once, and write the answers to `out` in the order of the prompts. Returns how
    many there were from an earlier start. An answer depends on its line, the seed and the number of the line alone."""
    if job.model.module or not job.model.continues_text:
        what = job.model.module or f"model.family={job.model.family}"
        raise JobError(f"--prompts needs a decoder of tokens, and this run trains {what}")
    settings = {"checkpoint": str(found.path), "tokens": tokens, "ema": ema, "template": template, **asdict(sampling)}
    answers = Answers(out, json.loads(_dumps(settings)))
    talks = any("messages" in line for line in prompts)
    encoder = open_template(job, template) if talks else None
    before = answers.begin(prompts)
    if before < len(prompts):
        answerer = Answerer(found, job, encoder, tokens, sampling, ema)
        for first in range(before, len(prompts), batch):
            lines = prompts[first : first + batch]
            answers.add(
                [{**line, ANSWER: text} for line, text in zip(lines, answerer.answer(lines, first), strict=True)]
            )
            if report is not None:
                report(first + len(lines), len(prompts))
    answers.finish()
    return before


class Answerer:
    """A model that continues prompts and answers messages."""

    def __init__(
        self, found: SavedCheckpoint, job: Job, encoder: ConversationEncoder | None, tokens: int, sampling: Sampling,
        ema: bool,
    ):  # fmt: skip
        self.tokenizer = open_tokenizer(job.data)
        self.model, self.tokens, self.sampling = load_model(found, job, ema), tokens, sampling
        self.window, self.ends = job.model.max_len or job.data.seq_len, end_tokens(job.model.pretrained)
        self.chat = None if encoder is None else Chat(
            self.model, self.tokenizer, encoder.template, window=self.window, tokens=tokens, sampling=sampling,
            ends=self.ends,
        )  # fmt: skip

    def answer(self, lines: Sequence[Line], first: int) -> list[str]:
        """The answers to some lines, of which the first is line number `first` of the file, from 0."""
        texts = [""] * len(lines)
        for talks in (False, True):
            chosen = [i for i, line in enumerate(lines) if ("messages" in line) == talks]
            for i, part in self._continue([lines[i] for i in chosen], [first + i for i in chosen], talks):
                texts[chosen[i]] += part
        return [text.strip() if "messages" in line else text for line, text in zip(lines, texts, strict=True)]

    def _continue(self, lines: Sequence[Line], numbers: Sequence[int], talks: bool) -> Iterator[tuple[int, str]]:
        if not lines:
            return iter(())
        sampling, ends = self.sampling, self.ends
        if talks:
            assert self.chat is not None
            sampling, ends = self.chat.sampling, self.chat.ends
            prompts = [self.chat.encoder.encode_prompt(line["messages"]) for line in lines]
        else:
            prompts = [[int(t) for t in self.tokenizer.encode_prompt(line["prompt"])] for line in lines]
        return continue_tokens(
            self.model, self.tokenizer, prompts, self.tokens, sampling, window=self.window, end_tokens=ends,
            numbers=numbers,
        )  # fmt: skip
