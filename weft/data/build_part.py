"""One part of a build: its documents encoded into one file, written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.build_sources import Part, bad_record, read_range, records, texts
from weft.data.chat.conversations import ConversationEncoder, Mask, messages_of
from weft.data.chat.template import ChatTemplate
from weft.data.store import token_dtype
from weft.data.tokenizer import ByteTokenizer, Tokenizer, Tokens
from weft.job.errors import file_named

_HEADER = np.dtype("<i8")


@dataclass(frozen=True)
class RecordLayout:
    """What the records of a source are: text in a field, or conversations that a template writes."""

    field: str = "text"
    format: str = "text"
    """text, chat or instruction."""
    template: str = ""
    """Source of the chat template."""
    tokens: tuple[tuple[str, str], ...] = ()
    """Names and texts of the special tokens that the template may write."""

    @property
    def masked(self) -> bool:
        """Whether only answers are targets."""
        return self.format != "text"


def part_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.part"


def write_part(target: Path, part: Part, tokenizer: Tokenizer, layout: RecordLayout) -> None:
    """Encode a part: the number of documents that end in it and of tokens, where they end, the tokens and, for
    conversations, the mask of answers."""
    dtype = token_dtype(tokenizer.vocab)
    chunks: list[Tokens] = []
    ends: list[int] = []
    length = 0
    masks: list[Mask] = []
    for tokens, mask, ended in _documents(part, tokenizer, layout):
        chunks.append(tokens.astype(dtype, copy=False))
        length += tokens.size
        if mask is not None:
            masks.append(mask)
            ends.append(length)
        elif ended:
            chunks.append(np.array([tokenizer.eos], dtype=dtype))
            length += 1
            ends.append(length)
    body = np.concatenate(chunks) if chunks else np.empty(0, dtype=dtype)
    header = np.array([len(ends), length, *ends], dtype=_HEADER)
    write_atomic(target, b"".join(array.tobytes() for array in (header, body, *masks)))


def _documents(part: Part, tokenizer: Tokenizer, layout: RecordLayout) -> Iterator[tuple[Tokens, Mask | None, bool]]:
    """The tokens of each document, or of the share of one that lies in the part, the mask of its answers, and whether
    the document ends."""
    encoder = None
    if layout.masked:
        encoder = ConversationEncoder(tokenizer, ChatTemplate(layout.template, "the store", dict(layout.tokens)))
    for byte_range in part:
        if encoder is not None:
            for number, record in records(byte_range):
                try:
                    messages = messages_of(record, layout.format)
                except ValueError as error:
                    raise bad_record(byte_range, number, str(error)) from None
                yield *encoder.encode(messages), True
        elif byte_range.kind != "text":
            for text in texts(byte_range, layout.field):
                yield tokenizer.encode(text), None, True
        elif isinstance(tokenizer, ByteTokenizer):
            # bytes are used unchanged, UTF-8 or not
            yield np.frombuffer(read_range(byte_range), dtype=np.uint8), None, byte_range.ends
        else:
            yield tokenizer.encode(read_range(byte_range).decode("utf-8", "replace")), None, byte_range.ends


def part_is_complete(path: Path, dtype: np.dtype[Any], masked: bool = False) -> bool:
    """Whether an earlier build completed this part."""
    try:
        with path.open("rb") as file:
            head = np.frombuffer(file.read(16), dtype=_HEADER)
            return head.size == 2 and os.fstat(file.fileno()).st_size == 16 + int(head[0]) * 8 + int(head[1]) * (
                dtype.itemsize + masked
            )
    except FileNotFoundError:
        return False


def read_part(path: Path, dtype: np.dtype[Any]) -> tuple[NDArray[np.int64], Tokens, Mask]:
    """Where documents end in the part, counted from its first token, its tokens, and the mask, which may be empty."""
    data = path.read_bytes()
    documents, length = (int(n) for n in np.frombuffer(data, dtype=_HEADER, count=2))
    ends = np.frombuffer(data, dtype=_HEADER, count=documents, offset=16)
    start = 16 + 8 * documents
    tokens = np.frombuffer(data, dtype=dtype, count=length, offset=start)
    return ends, tokens, np.frombuffer(data, dtype=np.uint8, offset=start + tokens.nbytes)


def write_atomic(target: Path, data: bytes, aside: Path | None = None) -> None:
    """Write a file so that it is either absent or complete if the process or the machine stops.

    The temporary file is in `aside`, by default in the target's folder.
    """
    # the process id separates a worker that outlived a killed build from the one that repeats its part
    temporary = (aside or target.parent) / f"{target.name}.{os.getpid()}.tmp"
    with file_named(temporary), temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rename_durable(temporary, target)


def rename_durable(temporary: Path, target: Path) -> None:
    """Rename a file and sync its folder."""
    temporary.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
