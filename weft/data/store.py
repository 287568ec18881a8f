"""The token store: a folder of tokens and document offsets that any number of ranks read at once."""

from __future__ import annotations

import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.file_array import FileArray
from weft.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from weft.job.data_files.token_files import (
    DOCS,
    MASK,
    META,
    PARTS,
    TOKENIZER,
    TOKENS,
    StoreMeta,
    damaged,
    read_meta,
    token_dtype_name,
)

CHECK_BYTES = 256 << 20
"""Checksums of smaller stores are verified on every opening; larger ones would delay the start of many ranks."""
SAMPLED_BLOCKS, BLOCK_BYTES = 64, 4096
"""Blocks of tokens.bin, evenly spaced, whose checksum is part of a store's fingerprint."""


@dataclass(frozen=True)
class Store:
    """An open store: the tokens of all documents end to end, and the offset of each document."""

    path: Path
    meta: StoreMeta
    tokens: FileArray
    docs: FileArray
    """Offsets into tokens, one more than there are documents: document d is tokens[docs[d]:docs[d + 1]]."""
    mask: FileArray | None = None
    """Of conversations, 1 for each token of an answer: only these are targets."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the store was built with."""
        return store_tokenizer(self.path, self.meta)

    def fingerprint(self) -> str:
        """Identifies the contents of the store, also where a large tokens.bin was replaced and meta.json was not."""
        whole, step = self.meta.crc32[TOKENS], max(1, self.tokens.size // SAMPLED_BLOCKS)
        sampled = 0
        for start in range(0, self.tokens.size, step):
            sampled = zlib.crc32(self.tokens[start : start + BLOCK_BYTES // self.tokens.dtype.itemsize].data, sampled)
        return f"{whole:08x}-{sampled:08x}"


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every token, little-endian on every machine."""
    return np.dtype(token_dtype_name(vocab)).newbyteorder("<")


def is_store(path: Path) -> bool:
    """Whether a folder is a store or an unfinished build of one."""
    return any((path / name).exists() for name in (META, TOKENS, PARTS))


def open_store(path: str | Path, *, check: bool | None = None) -> Store:
    """Open a store; a JobError if it is damaged.

    Sizes are always checked; checksums when `check` is true, or, left out, when the files are small enough to read.
    """
    path = Path(path)
    meta = read_meta(path)
    dtype = token_dtype(meta.vocab)
    sizes = {TOKENS: meta.tokens * dtype.itemsize, DOCS: (meta.documents + 1) * 8}
    sizes |= {MASK: meta.tokens} if MASK in meta.crc32 else {}
    for name, size in sizes.items():
        there = _size(path, name)
        if there != size:
            raise damaged(path, f"{name} has {there:,} bytes and should have {size:,}")
    if check if check is not None else sum(sizes.values()) <= CHECK_BYTES:
        for name, expected in meta.crc32.items():
            _size(path, name)
            if crc32(path / name) != expected:
                raise damaged(path, f"{name} does not have the checksum that {META} states")
    tokens, docs = (
        FileArray(path / name, kind, size)
        for name, kind, size in ((TOKENS, dtype, meta.tokens), (DOCS, np.dtype("<i8"), meta.documents + 1))
    )
    if docs[0] != 0 or docs[-1] != meta.tokens:
        raise damaged(path, f"{DOCS} does not span the {meta.tokens:,} tokens")
    mask = FileArray(path / MASK, np.dtype(np.uint8), meta.tokens) if MASK in sizes else None
    return Store(path, meta, tokens, docs, mask)


def store_tokenizer(path: Path, meta: StoreMeta) -> Tokenizer:
    """The tokenizer a store was built with, without opening its tokens."""
    if meta.tokenizer == "bytes":
        return ByteTokenizer()
    _size(path, TOKENIZER)
    return load_tokenizer(path / TOKENIZER)


def crc32(path: Path) -> int:
    """The checksum of a whole file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def sampled_crc32(path: Path, size: int, blocks: int, value: int = 0) -> int:
    """The checksum of blocks that are spread evenly over a file of this size."""
    with path.open("rb") as file:
        for at in range(0, size, max(BLOCK_BYTES, size // blocks)):
            file.seek(at)
            value = zlib.crc32(file.read(BLOCK_BYTES), value)
    return value


def _size(path: Path, name: str) -> int:
    try:
        status = (path / name).stat()
    except OSError:
        raise damaged(path, f"{name} is missing") from None
    if not stat.S_ISREG(status.st_mode):  # a named pipe would block
        raise damaged(path, f"{name} is not a regular file")
    return status.st_size
