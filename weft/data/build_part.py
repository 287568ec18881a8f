"""One part of a build: its documents encoded into one file, written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.sources import Part, json_texts, read_range
from weft.data.store import token_dtype
from weft.data.tokenizer import ByteTokenizer, Tokenizer, Tokens

_HEADER = np.dtype("<i8")


def part_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.part"


def write_part(target: Path, part: Part, tokenizer: Tokenizer, field: str) -> None:
    """Encode a part: the number of documents that end in it and of tokens, where they end, the tokens."""
    dtype = token_dtype(tokenizer.vocab)
    chunks: list[Tokens] = []
    ends: list[int] = []
    length = 0
    for tokens, ended in _documents(part, tokenizer, field):
        chunks.append(tokens.astype(dtype, copy=False))
        length += tokens.size
        if ended:
            chunks.append(np.array([tokenizer.eos], dtype=dtype))
            length += 1
            ends.append(length)
    body = np.concatenate(chunks) if chunks else np.empty(0, dtype=dtype)
    write_atomic(target, np.array([len(ends), length, *ends], dtype=_HEADER).tobytes() + body.tobytes())


def _documents(part: Part, tokenizer: Tokenizer, field: str) -> Iterator[tuple[Tokens, bool]]:
    """The tokens of each document, or of the share of one that lies in the part, and whether the document ends."""
    for byte_range in part:
        if byte_range.kind == "jsonl":
            for text in json_texts(byte_range, field):
                yield tokenizer.encode(text), True
        elif isinstance(tokenizer, ByteTokenizer):
            # bytes are used unchanged, UTF-8 or not
            yield np.frombuffer(read_range(byte_range), dtype=np.uint8), byte_range.ends
        else:
            yield tokenizer.encode(read_range(byte_range).decode("utf-8", "replace")), byte_range.ends


def part_is_complete(path: Path, dtype: np.dtype[Any]) -> bool:
    """Whether an earlier build completed this part."""
    try:
        with path.open("rb") as file:
            head = np.frombuffer(file.read(16), dtype=_HEADER)
            return (
                head.size == 2
                and os.fstat(file.fileno()).st_size == 16 + int(head[0]) * 8 + int(head[1]) * dtype.itemsize
            )
    except FileNotFoundError:
        return False


def read_part(path: Path, dtype: np.dtype[Any]) -> tuple[NDArray[np.int64], Tokens]:
    """Where documents end in the part, counted from its first token, and its tokens."""
    data = path.read_bytes()
    documents = int(np.frombuffer(data, dtype=_HEADER, count=1)[0])
    ends = np.frombuffer(data, dtype=_HEADER, count=documents, offset=16)
    return ends, np.frombuffer(data, dtype=dtype, offset=16 + 8 * documents)


def write_atomic(target: Path, data: bytes, aside: Path | None = None) -> None:
    """Write a file so that it is either absent or complete if the process or the machine stops.

    The temporary file is in `aside`, by default in the target's folder.
    """
    # the process id separates a worker that outlived a killed build from the one that repeats its part
    temporary = (aside or target.parent) / f"{target.name}.{os.getpid()}.tmp"
    with temporary.open("wb") as file:
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
