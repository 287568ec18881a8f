"""Chat templates: the tokenizer's own Jinja template, run in a sandbox in a process with limits on its work.

A template is text from a file that anyone may have written. It can read the messages and write text: attributes of
Python objects, imports and changes of its inputs are refused, and work beyond the limits ends in an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.data.chat.render_process import RenderProcess
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
MAX_TEMPLATE_BYTES = 1 << 20


class ChatTemplate:
    """A template with the special tokens that it may write. A process of its own renders it."""

    def __init__(self, source: str, name: str, tokens: dict[str, str]):
        self.name, self.source, self.tokens = name, source, tokens
        self._process = RenderProcess(source, name, tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.name, self.tokens)

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The text of a conversation; with `prompt`, followed by what precedes an answer."""
        text: str = self._process.render(messages, prompt=prompt)["text"]
        return text

    def render_answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where the assistant's messages are in it, with what ends them."""
        answer = self._process.render(messages, answers=True)
        return answer["text"], [(start, end) for start, end in answer["spans"]]


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
        raise JobError(f"{path} is not JSON: {error}") from None
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
