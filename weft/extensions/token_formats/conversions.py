"""Token files of other libraries: Megatron's .bin with .idx, and nanoGPT's .bin, converted to and from token stores."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from weft.data import store
from weft.data.build_part import rename_durable, write_atomic
from weft.data.file_array import FileArray
from weft.data.tokenizer import load_tokenizer
from weft.job.data_files import token_files
from weft.job.errors import JobError, MachineError, describe_file_error

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
CODES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of dtypes in a .idx file."""
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype, sequences, entries of the document index."""
MEGATRON_UINT16_VOCAB = 65_500
"""Megatron writes smaller vocabularies as uint16, others as int32."""
LLMC_MAGIC, LLMC_HEADER_BYTES = 20240520, 1024
"""First number and size of the header that llm.c and modded-nanogpt put before the tokens."""
CHUNK = 1 << 22
"""Tokens that are copied at a time."""
FORMATS = ("store", "megatron", "nanogpt")


@dataclass(frozen=True)
class Documents:
    """Tokens end to end, and where documents begin and end."""

    tokens: FileArray
    docs: NDArray[np.int64] | FileArray | None
    """None: documents end where the end token is."""


def read_tokens(path: Path) -> tuple[str, Documents]:
    """The format of a path, and its documents."""
    if path.is_dir():
        opened = store.open_store(path)
        if opened.mask is not None:
            raise JobError(f"{path} marks the tokens of answers, which other formats cannot hold")
        return "store", Documents(opened.tokens, opened.docs)
    index = path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")
    try:
        if index.is_file():
            return "megatron", _read_megatron(index)
        if path.is_file():
            return "nanogpt", _read_nanogpt(path)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error}") from error
    raise JobError(f"{path} is no token store, no .bin file and no prefix of Megatron's .bin and .idx files")


def _read_megatron(index: Path) -> Documents:
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise JobError(f"{index} is no index of Megatron: it does not begin with {MAGIC!r}")
        _, version, code, sequences, entries = HEADER.unpack(head)
        if version != VERSION or code not in CODES:
            raise JobError(f"{index} has the version {version} and the dtype {code}; Weft reads version 1 of integers")
        needed = HEADER.size + 12 * sequences + 8 * entries
        if size not in (needed, needed + sequences):  # the last for several modalities
            raise JobError(f"{index} has {size:,} bytes, and {sequences:,} sequences need {needed:,}: it is damaged")
        lengths, offsets, documents = (
            np.frombuffer(file.read(count * np.dtype(kind).itemsize), kind).astype(np.int64)
            for kind, count in (("<i4", sequences), ("<i8", sequences), ("<i8", entries))
        )
    dtype, data = np.dtype(CODES[code]), index.with_suffix(".bin")
    if not data.is_file():
        raise JobError(f"{index} has no {data.name} beside it")
    held = data.stat().st_size // dtype.itemsize
    expected = np.concatenate([[0], np.cumsum(lengths)])
    if (lengths < 0).any() or not np.array_equal(offsets, expected[:-1] * dtype.itemsize) or expected[-1] > held:
        raise JobError(f"{index} does not describe {data.name}: sequences must follow one another and lie inside it")
    if not entries or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise JobError(f"{index} has documents that do not span its sequences: it is damaged")
    return Documents(FileArray(data, dtype, int(expected[-1])), expected[np.unique(documents)])


def _read_nanogpt(path: Path) -> Documents:
    size, skip = path.stat().st_size, 0
    with path.open("rb") as file:
        head = np.frombuffer(file.read(12), "<i4") if size >= LLMC_HEADER_BYTES else np.zeros(3, "<i4")
    count = size // 2
    if head[0] == LLMC_MAGIC:
        skip, count = LLMC_HEADER_BYTES // 2, int(head[2])
        if head[1] != 1 or size != LLMC_HEADER_BYTES + 2 * count:
            raise JobError(f"{path} has {size:,} bytes, and its header names {count:,} tokens of version {head[1]}")
    elif size % 2 or not size:
        raise JobError(f"{path} has {size:,} bytes; nanoGPT's tokens have 2 each")
    return Documents(FileArray(path, np.dtype("<u2"), count, first=skip), None)


def convert(source: Path, out: Path, to: str, tokenizer: str | None = None) -> tuple[int, int, str]:
    """Convert tokens to a format of FORMATS. Returns the numbers of tokens and documents, and the format of `source`.

    A store needs a tokenizer; that of a source that is a store itself is kept.
    """
    if to not in FORMATS:
        raise JobError(f"--to {to!r} is not a known format; use {', '.join(FORMATS)}")
    found, documents = read_tokens(source)
    if found == to:
        raise JobError(f"{source} is in the format {to} already")
    try:
        if to == "store":
            return *_write_store(documents, out, tokenizer, source), found
        meta = token_files.read_meta(source) if found == "store" else None
        vocab = meta.vocab if meta else int(np.iinfo(documents.tokens.dtype).max) + 1
        return *(_write_megatron if to == "megatron" else _write_nanogpt)(documents, out, vocab), found
    except OSError as error:
        raise MachineError(f"{out} cannot be written: {describe_file_error(error)}") from error


def _chunks(documents: Documents) -> Iterator[NDArray[Any]]:
    for start in range(0, documents.tokens.size, CHUNK):
        yield documents.tokens[start : start + CHUNK]


def _offsets(documents: Documents, eos: int | None) -> NDArray[np.int64]:
    if documents.docs is not None:
        return np.asarray(documents.docs[:], dtype=np.int64)
    found = [np.zeros(1, np.int64)]
    for i, chunk in enumerate(_chunks(documents) if eos is not None else ()):
        found.append(np.flatnonzero(chunk == eos) + i * CHUNK + 1)
    ends = np.concatenate(found)
    return ends if ends[-1] == documents.tokens.size else np.append(ends, documents.tokens.size)


def _checked(chunk: NDArray[Any], vocab: int, what: str) -> NDArray[Any]:
    if chunk.size and (int(chunk.min()) < 0 or int(chunk.max()) >= vocab):
        wrong = int(chunk.min()) if int(chunk.min()) < 0 else int(chunk.max())
        raise JobError(f"{what} has the token {wrong}, outside of a vocabulary of {vocab:,}")
    return chunk


def _write(file: BinaryIO, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
    rename_durable(Path(file.name), path)


def _open_new(path: Path) -> BinaryIO:
    if path.exists():
        raise JobError(f"{path} exists already; name another output")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(path.name + ".tmp").open("wb")


def _write_store(documents: Documents, out: Path, tokenizer: str | None, source: Path) -> tuple[int, int]:
    if tokenizer is None:
        raise JobError("a token store needs the tokenizer of its tokens; write --tokenizer bytes or a tokenizer.json")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"{out} exists already; name a new or an empty folder")
    loaded = load_tokenizer(tokenizer)
    dtype, crcs = store.token_dtype(loaded.vocab), {token_files.TOKENS: 0}
    out.mkdir(parents=True, exist_ok=True)
    file = (out / f"{token_files.TOKENS}.tmp").open("wb")
    for chunk in _chunks(documents):
        data = _checked(chunk, loaded.vocab, str(source)).astype(dtype).tobytes()
        file.write(data)
        crcs[token_files.TOKENS] = zlib.crc32(data, crcs[token_files.TOKENS])
    _write(file, out / token_files.TOKENS)
    offsets = _offsets(documents, loaded.eos)
    parts = {token_files.DOCS: offsets.astype("<i8").tobytes()}
    if tokenizer != "bytes":
        parts[token_files.TOKENIZER] = token_files.find_tokenizer(tokenizer).read_bytes()
    for name, data in parts.items():
        write_atomic(out / name, data)
        crcs[name] = zlib.crc32(data)
    meta = token_files.StoreMeta(
        format=token_files.FORMAT, vocab=loaded.vocab, dtype=dtype.name, tokens=documents.tokens.size,
        documents=offsets.size - 1, tokenizer="bytes" if tokenizer == "bytes" else token_files.TOKENIZER,
        eos=loaded.eos, crc32=crcs, source=[str(source)],
    )  # fmt: skip
    write_atomic(out / token_files.META, meta.to_json().encode())
    return documents.tokens.size, offsets.size - 1


def _write_megatron(documents: Documents, out: Path, vocab: int) -> tuple[int, int]:
    prefix = out.with_suffix("") if out.suffix in (".bin", ".idx") else out
    dtype, code = (np.dtype("<u2"), 8) if vocab < MEGATRON_UINT16_VOCAB else (np.dtype("<i4"), 4)
    data, index = (prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx"))
    index_file, data_file = _open_new(index), _open_new(data)
    for chunk in _chunks(documents):
        data_file.write(chunk.astype(dtype).tobytes())
    offsets = _offsets(documents, None)
    count = offsets.size - 1
    index_file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
    index_file.write(np.diff(offsets).astype("<i4").tobytes())
    index_file.write((offsets[:-1] * dtype.itemsize).astype("<i8").tobytes())
    index_file.write(np.arange(count + 1, dtype="<i8").tobytes())
    _write(data_file, data)
    _write(index_file, index)
    return documents.tokens.size, count


def _write_nanogpt(documents: Documents, out: Path, vocab: int) -> tuple[int, int]:
    if vocab > 1 << 16:
        raise JobError(
            f"nanoGPT's tokens have 2 bytes, and a vocabulary of {vocab:,} does not fit; --to megatron would"
        )
    file = _open_new(out if out.suffix == ".bin" else out.with_name(out.name + ".bin"))
    for chunk in _chunks(documents):
        file.write(_checked(chunk, 1 << 16, "the source").astype("<u2").tobytes())
    _write(file, out if out.suffix == ".bin" else out.with_name(out.name + ".bin"))
    return documents.tokens.size, _offsets(documents, None).size - 1
