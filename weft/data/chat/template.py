"""Chat templates: the tokenizer's own Jinja template, run in a sandbox with a limit on its work.

A template is text from a file that anyone may have written. It can read the messages and write text: attributes of
Python objects, imports and changes of its inputs are refused, and so are endless loops and huge strings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from weft.job.data_files.token_files import MAX_JSON_BYTES, TOKENIZER
from weft.job.errors import JobError

Message = dict[str, Any]
"""role and content, and whatever else a template reads."""

TOKENIZER_CONFIG, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
BUILT_IN = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "plain": "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}",
}
"""Templates by name: chatml marks turns, plain joins the contents by line ends and ends each answer with eos_token."""
MAX_LINES = 1_000_000
"""Lines of a compiled template that one conversation may run."""
MAX_OUTPUT = 1 << 26
"""Characters of one conversation."""
MAX_TEMPLATE_BYTES = 1 << 20


class ChatTemplate:
    """A compiled template with the special tokens that it may write."""

    def __init__(self, source: str, name: str, tokens: dict[str, str]):
        self.name, self.source, self.tokens = name, source, tokens
        self._render = _compile(source, name)

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The text of a conversation; with `prompt`, followed by what precedes an answer."""
        return self._render(messages=list(messages), add_generation_prompt=prompt, **self.tokens)

    def render_answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where the assistant's messages are in it, with what ends them."""
        text, spans, at = self.render(messages), list[tuple[int, int]](), 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            span = self._span(text, messages, i)
            if span is None:  # the template changes earlier turns by later ones: the content alone
                start = text.find(message["content"], at)
                span = (start, start + len(message["content"])) if start >= 0 else (at, at)
            spans.append(span)
            at = span[1]
        return text, spans

    def _span(self, text: str, messages: Sequence[Message], i: int) -> tuple[int, int] | None:
        """Where message i is in the text of all, if the text of those before it and up to it begin that of all."""
        try:
            before, upto = self.render(messages[:i], prompt=True) if i else "", self.render(messages[: i + 1])
        except JobError:  # some templates refuse a part of a conversation
            return None
        return (len(before), len(upto)) if upto.startswith(before) and text.startswith(upto) else None


def _compile(source: str, name: str) -> Callable[..., str]:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """A sandbox in which products and powers are bounded."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not (abs(left) < 2**31 and abs(right) < 64):
                raise jinja2.sandbox.SecurityError("a power that is too large")
            repeats = operator == "*" and any(isinstance(x, str | bytes | list | tuple) for x in (left, right))
            sizes = [len(x) if isinstance(x, str | bytes | list | tuple) else x for x in (left, right)]
            if repeats and sizes[0] * sizes[1] > MAX_OUTPUT:
                raise jinja2.sandbox.SecurityError("a product that is too long")
            return super().call_binop(context, operator, left, right)

    def fail(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals = {
        "range": environment.globals["range"], "namespace": environment.globals["namespace"],
        "dict": environment.globals["dict"], "raise_exception": fail,
        "strftime_now": lambda form: datetime(2024, 1, 1).strftime(form),  # the same text on every day
    }  # fmt: skip
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        template = environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise JobError(f"the chat template of {name} is not valid: {_first_line(error)}") from None

    def render(**variables: Any) -> str:
        out, size = [], 0
        try:
            with _limited(name):
                for piece in template.generate(**variables):
                    size += len(piece)
                    if size > MAX_OUTPUT:
                        raise JobError(f"the chat template of {name} writes more than {MAX_OUTPUT:,} characters")
                    out.append(piece)
        except JobError:
            raise
        except Exception as error:  # a template may raise anything that its operations do
            raise JobError(f"the chat template of {name} failed: {_first_line(error)}") from None
        return "".join(out)

    return render


@contextmanager
def _limited(name: str) -> Any:
    """Stop a template that runs too many lines. Only compiled templates are counted."""
    left = MAX_LINES

    def count(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise JobError(f"the chat template of {name} does not end")
        return count

    def enter(frame: FrameType, event: str, value: Any) -> Any:
        return count if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def load_template(tokenizer: str, chosen: str | None, eos: str) -> ChatTemplate:
    """The template that a job names, else that of the tokenizer's folder."""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config = {} if tokenizer == "bytes" else _read_config(folder / TOKENIZER_CONFIG)
    tokens = {"eos_token": eos, "bos_token": ""} | {
        key: found
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (found := _token_text(config.get(key))) is not None
    }
    if chosen in BUILT_IN:
        return ChatTemplate(BUILT_IN[chosen], f"data.template={chosen}", tokens)
    if chosen is not None:
        return ChatTemplate(_read_text(Path(chosen)), chosen, tokens)
    if tokenizer != "bytes" and (folder / TEMPLATE_FILE).is_file():
        return ChatTemplate(_read_text(folder / TEMPLATE_FILE), str(folder / TEMPLATE_FILE), tokens)
    own = config.get("chat_template")
    if isinstance(own, list):  # several by name
        named = {str(t.get("name")): t.get("template") for t in own if isinstance(t, dict)}
        own = named.get("default")
    if isinstance(own, str) and len(own) <= MAX_TEMPLATE_BYTES:
        return ChatTemplate(own, str(folder / TOKENIZER_CONFIG), tokens)
    where = "the tokenizer bytes" if tokenizer == "bytes" else f"the folder of {folder / TOKENIZER}"
    raise JobError(
        f"{where} has no chat template; write data.template=chatml, data.template=plain or the path of a .jinja file"
    )


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise JobError(f"{path} is not JSON: {_first_line(error)}") from None
    return found if isinstance(found, dict) else {}


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():  # a named pipe would block
            raise JobError(f"data.template {str(path)!r}: no such file; write {', '.join(BUILT_IN)} or a .jinja file")
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise JobError(f"{path} has more than {MAX_TEMPLATE_BYTES:,} bytes and is no chat template")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(BUILT_IN)
        raise JobError(
            f"data.template {str(path)!r} cannot be read ({error}); write {known} or a .jinja file"
        ) from None
