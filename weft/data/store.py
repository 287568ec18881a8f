"""The token store: a folder of memory-mapped tokens and document borders that any number of ranks read at once."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.tokenizer import ByteTokenizer, Tokenizer, Tokens, load_tokenizer
from weft.job.errors import JobError

FORMAT = "weft-tokens-1"
META, TOKENS, DOCS, TOKENIZER, PARTS = "meta.json", "tokens.bin", "docs.bin", "tokenizer.json", ".parts"
# up to here every opening reads the files whole; above it a start of many ranks would wait for the disk
CHECK_BYTES = 256 << 20


@dataclass(frozen=True)
class StoreMeta:
    """Contents of meta.json, which is written last: a folder that has it is complete."""

    format: str
    vocab: int
    dtype: str
    tokens: int
    documents: int
    tokenizer: str
    eos: int
    crc32: dict[str, int]
    source: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Store:
    """An open store: the tokens of all documents end to end, and the offset of each document."""

    path: Path
    meta: StoreMeta
    tokens: Tokens
    docs: NDArray[np.int64]
    """Offsets into tokens, one more than there are documents: document d is tokens[docs[d]:docs[d + 1]]."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the store was built with."""
        return store_tokenizer(self.path, self.meta)


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every token, little-endian on every machine."""
    return np.dtype("u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")


def is_store(path: Path) -> bool:
    """Whether a folder is a store or an unfinished build of one."""
    return any((path / name).exists() for name in (META, TOKENS, PARTS))


def open_store(path: str | Path, *, check: bool | None = None) -> Store:
    """Map a store into memory; a JobError if it is damaged.

    Sizes are always checked; checksums when `check` is true, or, left out, when the files are small enough to read.
    """
    path = Path(path)
    meta = read_meta(path)
    dtype = token_dtype(meta.vocab)
    sizes = {TOKENS: meta.tokens * dtype.itemsize, DOCS: (meta.documents + 1) * 8}
    for name, size in sizes.items():
        there = _size(path, name)
        if there != size:
            raise _damaged(path, f"{name} has {there:,} bytes and should have {size:,}")
    if check if check is not None else sum(sizes.values()) <= CHECK_BYTES:
        for name, expected in meta.crc32.items():
            _size(path, name)
            if crc32(path / name) != expected:
                raise _damaged(path, f"{name} does not have the checksum that {META} states")
    tokens = np.memmap(path / TOKENS, dtype=dtype, mode="r", shape=(meta.tokens,))
    docs = np.memmap(path / DOCS, dtype="<i8", mode="r", shape=(meta.documents + 1,))
    if docs[0] != 0 or docs[-1] != meta.tokens:
        raise _damaged(path, f"{DOCS} does not span the {meta.tokens:,} tokens")
    # a plain view of the same mapping: slicing a memmap object costs ten times as much
    return Store(path, meta, tokens.view(np.ndarray), docs.view(np.ndarray))


def read_meta(path: Path) -> StoreMeta:
    """The metadata of a store, without opening its tokens."""
    if not path.is_dir():
        raise JobError(f"no token store is at {path}; make one with: weft data build SOURCE --out {path}")
    file = path / META
    if not file.is_file():
        if (path / PARTS).is_dir():
            raise JobError(f"the store {path} is not finished; run the same `weft data build` again, it will continue")
        raise JobError(
            f"{path} is not a token store: it has no {META}; make one with: weft data build SOURCE --out DIR"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise _damaged(path, f"{META} is not JSON") from None
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise JobError(f"the store {path} has the format {found!r} and this Weft reads {FORMAT!r}; build it again")
    try:
        meta = StoreMeta(**raw)
        numbers = [meta.vocab - 1, meta.tokens - 1, meta.documents - 1, meta.eos, *map(int, meta.crc32.values())]
        sane = all(isinstance(n, int) and n >= 0 for n in numbers) and {TOKENS, DOCS} <= set(meta.crc32)
    except (TypeError, ValueError, AttributeError):
        sane = False
    if not sane or meta.dtype != token_dtype(meta.vocab).name or meta.eos >= meta.vocab:
        raise _damaged(path, f"{META} lacks a field or has one of the wrong kind")
    return meta


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


def _size(path: Path, name: str) -> int:
    try:
        return os.path.getsize(path / name)
    except OSError:
        raise _damaged(path, f"{name} is missing") from None


def _damaged(path: Path, what: str) -> JobError:
    return JobError(f"the token store {path} is damaged: {what}; delete the folder and run `weft data build` again")
