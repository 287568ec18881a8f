"""Source files of a build in a fixed order, split into parts of bounded size, and their documents."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from weft.job.errors import JobError
from weft.job.token_files import PARTS, TOKENS

PART_BYTES = 8 << 20
_BORDER_SEARCH_BYTES = 64 << 10
# cost of opening a file in bytes, so that a part does not have a million empty files
_FILE_COST = 512

_JSONL = {".jsonl", ".ndjson"}
_TEXT = """.txt .text .md .markdown .rst .adoc .org .tex .html .htm .xml .csv .tsv .json .yaml .yml .toml .ini .cfg .log
.py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .rs .go .java .kt .scala .swift .js .jsx .ts .tsx .css .rb .php .pl .lua
.sh .sql .r .jl .hs .ml .cs .m .f90"""
_PACKED = ".gz .bz2 .xz .zst .lz4 .zip .tar .tgz .7z .parquet .arrow .feather .npy .npz .bin .pdf .docx"
TEXT_SUFFIXES = _JSONL | set(_TEXT.split())


@dataclass(frozen=True)
class SourceFile:
    """A file as it was at the start of the build."""

    path: str
    kind: Literal["text", "jsonl"]
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ByteRange:
    """A byte range of one file; `ends` when the file's last byte is in it."""

    path: str
    kind: Literal["text", "jsonl"]
    start: int
    stop: int
    ends: bool


Part = tuple[ByteRange, ...]


def find_files(sources: Sequence[str | Path], out: Path) -> list[SourceFile]:
    """Every file of the sources in the order given, a folder's files sorted by path."""
    files: list[SourceFile] = []
    for source in sources:
        path = Path(source)
        if path.is_dir() and _is_store(path):
            raise JobError(f"{path} is a token store already; name the text it was built from")
        if path.is_dir():
            inside = _walk(path, out.resolve())
            if not inside:
                raise JobError(
                    f"the folder {path} holds no text file; weft data build takes {' '.join(sorted(TEXT_SUFFIXES))}"
                )
            files += [_describe(p) for p in inside]
        elif path.is_file():
            if path.suffix.lower() in _PACKED.split():
                raise JobError(f"{path} is not plain text; unpack or convert it to .txt or .jsonl first")
            files.append(_describe(path))
        elif path.exists():
            raise JobError(f"{path} is neither a file nor a folder; write its contents to a .txt or .jsonl file first")
        else:
            raise JobError(f"there is no file or folder {path}")
    if not files:
        raise JobError("weft data build needs at least one text file, .jsonl file or folder")
    return files


def _is_store(folder: Path) -> bool:
    return (folder / TOKENS).exists() or (folder / PARTS).is_dir()


def _walk(folder: Path, out: Path) -> list[Path]:
    found: list[Path] = []

    def unreadable(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=unreadable):
        place = Path(here)
        # the .json files of a store are not training data
        folders[:] = [
            f for f in folders if not (f.startswith(".") or (place / f).resolve() == out or _is_store(place / f))
        ]
        found += [
            place / name
            for name in names
            if not name.startswith(".") and Path(name).suffix.lower() in TEXT_SUFFIXES and (place / name).is_file()
        ]
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _describe(path: Path) -> SourceFile:
    stat = path.stat()
    kind: Literal["text", "jsonl"] = "jsonl" if path.suffix.lower() in _JSONL else "text"
    return SourceFile(str(path.resolve()), kind, stat.st_size, stat.st_mtime_ns)


def split_into_parts(files: Sequence[SourceFile], part_bytes: int) -> list[Part]:
    """Parts of about part_bytes: small files share a part, a large file is split at line ends.

    The parts depend on the files and part_bytes alone, not on the number of workers, so a resumed build has the same.
    """
    parts: list[Part] = []
    open_part: list[ByteRange] = []
    weight = 0
    for file in files:
        for byte_range in _byte_ranges(file, part_bytes):
            open_part.append(byte_range)
            weight += byte_range.stop - byte_range.start + _FILE_COST
            if weight >= part_bytes:
                parts.append(tuple(open_part))
                open_part, weight = [], 0
    if open_part:
        parts.append(tuple(open_part))
    return parts


def _byte_ranges(file: SourceFile, part_bytes: int) -> Iterator[ByteRange]:
    if file.size <= part_bytes:
        yield ByteRange(file.path, file.kind, 0, file.size, True)
        return
    border = _line_start if file.kind == "jsonl" else _text_border
    with open(file.path, "rb") as handle:
        start = 0
        while start < file.size:
            stop = file.size
            if start + part_bytes < file.size:
                stop = min(border(handle, start, start + part_bytes), file.size)
            yield ByteRange(file.path, file.kind, start, stop, stop == file.size)
            start = stop


def _line_start(handle: BinaryIO, start: int, target: int) -> int:
    """The first line start at or after target: a JSON line is never split."""
    handle.seek(target - 1)
    at = target - 1
    while block := handle.read(_BORDER_SEARCH_BYTES):
        found = block.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(block)
    return at


def _text_border(handle: BinaryIO, start: int, target: int) -> int:
    """The last line start shortly before target; in text without lines, a place between two characters of UTF-8."""
    low = max(start + 1, target - _BORDER_SEARCH_BYTES)
    handle.seek(low)
    block = handle.read(target - low + 1)
    found = block.rfind(b"\n", 0, target - low)
    if found >= 0:
        return low + found + 1
    at = len(block) - 1
    while at > max(0, len(block) - 4) and block[at] & 0xC0 == 0x80:
        at -= 1
    return low + at


def read_range(byte_range: ByteRange) -> bytes:
    """The bytes of a byte_range."""
    with open(byte_range.path, "rb") as handle:
        handle.seek(byte_range.start)
        data = handle.read(byte_range.stop - byte_range.start)
    if len(data) != byte_range.stop - byte_range.start:
        raise JobError(f"{byte_range.path} became shorter while it was read; start the build again when it is complete")
    return data


def json_texts(byte_range: ByteRange, field: str) -> Iterator[str]:
    """The text of each line of a .jsonl byte_range; lines of nothing but blanks are skipped."""
    data = read_range(byte_range)
    at, number = 0, 0
    if byte_range.start == 0 and data.startswith(b"\xef\xbb\xbf"):
        at = 3
    while at < len(data):
        stop = data.find(b"\n", at)
        stop = len(data) if stop < 0 else stop
        line = data[at:stop]
        number += 1
        if line.strip():
            yield _json_text(line, field, byte_range, number)
        at = stop + 1


def _json_text(line: bytes, field: str, byte_range: ByteRange, number: int) -> str:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise _bad_line(byte_range, number, "is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _bad_line(byte_range, number, f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _bad_line(byte_range, number, f"is a JSON {type(value).__name__}, not an object with the field {field!r}")
    if field not in value:
        has = ", ".join(list(value)[:8]) or "nothing"
        raise _bad_line(
            byte_range, number, f"has no field {field!r} (it has {has}); name the one that holds the text: --field"
        )
    text = value[field]
    if not isinstance(text, str):
        raise _bad_line(byte_range, number, f"has a {type(text).__name__} in the field {field!r}, not text")
    return text


def _bad_line(byte_range: ByteRange, number: int, what: str) -> JobError:
    before = 0
    with open(byte_range.path, "rb") as handle:
        left = byte_range.start
        while left and (block := handle.read(min(left, 1 << 20))):
            before += block.count(b"\n")
            left -= len(block)
    return JobError(f"{byte_range.path} line {before + number} {what}")
