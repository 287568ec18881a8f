"""From records to conversations, and from conversations to tokens with a mask of the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.chat.template import ChatTemplate, Message
from weft.data.formats.record_files import Record
from weft.data.tokenizer import ByteTokenizer, Tokenizer, Tokens, encoding, utf8

Mask = NDArray[np.uint8]
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Other names of roles (ShareGPT and its relatives)."""
MESSAGE_FIELDS = ("messages", "conversations", "conversation", "dialog", "chat")
QUESTIONS, ANSWERS = ("instruction", "prompt", "question"), ("output", "completion", "response", "answer")


def messages_of(record: Record, format: str) -> list[Message]:
    """The messages of a record; a ValueError describes what is wrong."""
    return _chat(record) if format == "chat" else _instruction(record)


def _chat(record: Record) -> list[Message]:
    field = next((name for name in MESSAGE_FIELDS if record.get(name)), None)
    if field is None:
        raise ValueError(
            f"has no {' or '.join(MESSAGE_FIELDS[:2])} (it has {', '.join(list(record)[:8]) or 'nothing'})"
        )
    given = record[field]
    if not isinstance(given, list) or not all(isinstance(m, dict) for m in given):
        raise ValueError(f"has a {field} that is not a list of messages such as {{role: user, content: …}}")
    system = record.get("system")
    found: list[Message] = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    for message in given:
        role = message.get("role", message.get("from"))
        content = _text(message.get("content", message.get("value")))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"has a message in {field} without role and content as text")
        found.append({**message, "role": ROLES.get(role, role), "content": content})
    return _with_answer(found)


def _text(content: Any) -> Any:
    """The text of a message that is given in parts {type: text, text: …}; other content as it is."""
    parts = content if isinstance(content, list) else []
    texts = [p["text"] for p in parts if isinstance(p, dict) and p.get("type") == "text" and "text" in p]
    whole = bool(texts) and len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if whole else content


def _instruction(record: Record) -> list[Message]:
    question = next((name for name in QUESTIONS if isinstance(record.get(name), str)), None)
    answer = next((name for name in ANSWERS if isinstance(record.get(name), str)), None)
    if question is None or answer is None:
        raise ValueError(
            f"has no {' or '.join(QUESTIONS)} with {' or '.join(ANSWERS)} "
            f"(it has {', '.join(list(record)[:8]) or 'nothing'})"
        )
    more = record.get("input")
    text = f"{record[question]}\n\n{more}" if isinstance(more, str) and more else record[question]
    system = record.get("system")
    found: list[Message] = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return [*found, {"role": "user", "content": text}, {"role": "assistant", "content": record[answer]}]


def _with_answer(messages: list[Message]) -> list[Message]:
    if not any(m["role"] == "assistant" for m in messages):
        roles = ", ".join(dict.fromkeys(m["role"] for m in messages)) or "none"
        raise ValueError(f"has no message of the role assistant (its roles are {roles})")
    return messages


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes conversations by a tokenizer and a chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(self, messages: list[Message]) -> tuple[Tokens, Mask]:
        """The tokens of a conversation and 1 where one belongs to an answer; an end token is added if it has none."""
        text, spans = self.template.render_answers(messages)
        tokens, starts = self._tokens(text)
        mask = np.zeros(tokens.size, dtype=np.uint8)
        for start, end in spans:
            mask |= ((starts >= start) & (starts < end)).astype(np.uint8)
        if not tokens.size or tokens[-1] != self.tokenizer.eos:
            last = messages[-1]["role"] == "assistant"
            tokens, mask = np.append(tokens, tokens.dtype.type(self.tokenizer.eos)), np.append(mask, np.uint8(last))
        return tokens, mask

    def encode_prompt(self, messages: list[Message]) -> list[int]:
        """The tokens of a conversation and of what the template writes before an answer."""
        return self.tokens_of(self.template.render(messages, prompt=True))

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a text with its special tokens."""
        return [int(token) for token in self._tokens(text)[0]]

    def _tokens(self, text: str) -> tuple[Tokens, NDArray[np.int64]]:
        """Tokens of a text with its special tokens, and the index of each token's first character."""
        if isinstance(self.tokenizer, ByteTokenizer):
            lengths = [len(utf8(c)) for c in text]
            return np.frombuffer(utf8(text), dtype=np.uint8), np.repeat(np.arange(len(text)), lengths)
        inner: Any = self.tokenizer.inner  # type: ignore[attr-defined]
        before, inner.encode_special_tokens = inner.encode_special_tokens, False
        try:
            found = encoding(inner, utf8(text).decode("utf-8"))
        finally:
            inner.encode_special_tokens = before
        starts = np.array([start for start, _ in found.offsets], dtype=np.int64)
        return np.asarray(found.ids, dtype=np.uint32), starts
