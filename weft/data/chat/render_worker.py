"""The process that compiles and runs one chat template: a sandbox, with limits on its CPU time, memory and output.

`render_process.py` starts it. Every line of stdin is a JSON request, and every line of stdout the JSON answer to it.
Work that Python cannot interrupt, as a product of huge integers or a string of 10^12 blanks, ends this process alone.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]
"""The text of messages; with True, followed by what precedes an answer."""


class _OutputTooLong(Exception):
    pass


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends this process
    cpu_s, memory_bytes, output_chars = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for kind, limit in (
        (resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    render: Render | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
        try:
            request = json.loads(line)
            if render is None:
                render, answer = _compile(request["source"], request["tokens"], output_chars), {}
            elif request["answers"]:
                text, spans = render_answers(render, request["messages"])
                answer = {"text": text, "spans": spans}
            else:
                answer = {"text": render(request["messages"], request["prompt"])}
            written = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            written = b'{"error": "memory"}'
        except _OutputTooLong:
            written = b'{"error": "output"}'
        except Exception as error:  # a template may raise anything that its operations do
            written = json.dumps({"error": "failed", "text": _first_line(error)}).encode()
        sys.stdout.buffer.write(written + b"\n")
        sys.stdout.buffer.flush()


def _compile(source: str, tokens: dict[str, str], output_chars: int) -> Render:
    def fail(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals = {
        "range": environment.globals["range"], "namespace": environment.globals["namespace"],
        "dict": environment.globals["dict"], "raise_exception": fail,
        "strftime_now": lambda form: datetime(2024, 1, 1).strftime(form),  # the same text on every day
    }  # fmt: skip
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    template = environment.from_string(source)

    def render(messages: list[Message], prompt: bool) -> str:
        pieces, size = list[str](), 0
        for piece in template.generate(messages=messages, add_generation_prompt=prompt, **tokens):
            size += len(piece)
            if size > output_chars:
                raise _OutputTooLong
            pieces.append(piece)
        return "".join(pieces)

    return render


def render_answers(render: Render, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where the assistant's messages are in it, with what ends them."""
    text, spans, at = render(messages, False), list[tuple[int, int]](), 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        span = _span(render, text, messages, i)
        if span is None:  # the template changes earlier turns by later ones: the content alone
            start = text.find(message["content"], at)
            span = (start, start + len(message["content"])) if start >= 0 else (at, at)
        spans.append(span)
        at = span[1]
    return text, spans


def _span(render: Render, text: str, messages: list[Message], i: int) -> tuple[int, int] | None:
    """Where message i is in the text of all, if the text of those before it and up to it begin that of all."""
    try:
        before, upto = render(messages[:i], True) if i else "", render(messages[: i + 1], False)
    except MemoryError:
        raise
    except Exception:  # some templates refuse a part of a conversation
        return None
    return (len(before), len(upto)) if upto.startswith(before) and text.startswith(upto) else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    main()
