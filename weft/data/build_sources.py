"""Source files of a build in a fixed order, split into parts of bounded size, and their records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from weft.data.formats.huggingface_datasets import HUB_PREFIX, dataset_files, hub_dataset_files
from weft.data.formats.record_files import (
    RECORD_FORMATS,
    Record,
    group_sizes,
    parse_record,
    read_records,
    record_format,
)
from weft.data.shard_patterns import expand
from weft.job.data_files.token_files import PARTS, TOKENS
from weft.job.errors import JobError

PART_BYTES = 8 << 20
_BORDER_SEARCH_BYTES = 64 << 10
# cost of opening a file in bytes, so that a part does not have a million empty files
_FILE_COST = 512

_JSONL = {".jsonl", ".ndjson"}
_TEXT = """.txt .text .md .markdown .rst .adoc .org .tex .html .htm .xml .csv .tsv .json .yaml .yml .toml .ini .cfg .log
.py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .rs .go .java .kt .scala .swift .js .jsx .ts .tsx .css .rb .php .pl .lua
.sh .sql .r .jl .hs .ml .cs .m .f90"""
_PACKED = ".gz .bz2 .xz .zst .lz4 .zip .tar .tgz .7z .npy .npz .bin .pdf .docx"
TEXT_SUFFIXES = _JSONL | set(_TEXT.split())
Kind = str
"""text, jsonl, or an ending of formats/record_files.py."""


@dataclass(frozen=True)
class SourceFile:
    """A file as it was at the start of the build."""

    path: str
    kind: Kind
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ByteRange:
    """A byte range of one file, or a range of groups of rows where the kind is a table; `ends` when the file's last
    byte is in it."""

    path: str
    kind: Kind
    start: int
    stop: int
    ends: bool
    weight: int = 0
    """Bytes of the groups of rows."""

    @property
    def size(self) -> int:
        return self.weight or self.stop - self.start


Part = tuple[ByteRange, ...]


def find_files(sources: Sequence[str | Path], out: Path) -> list[SourceFile]:
    """Every file of the sources in the order given, a folder's files sorted by path."""
    files: list[SourceFile] = []
    for source in _expanded(sources):
        path = Path(source)
        if str(source).startswith(HUB_PREFIX) and not path.exists():
            files += [_describe(p) for p in hub_dataset_files(str(source))]
            continue
        if path.is_dir() and _is_store(path):
            raise JobError(f"{path} is a token store already; name the text it was built from")
        if path.is_dir():
            inside = [_describe(p) for p in dataset_files(path)] or _walk(path, out)
            if not inside:
                raise JobError(
                    f"the folder {path} holds no text file; weft data build takes "
                    f"{' '.join([*sorted(TEXT_SUFFIXES), *RECORD_FORMATS])}"
                )
            files += inside
        elif path.is_file():
            if record_format(path) is None and path.suffix.lower() in _PACKED.split():
                raise JobError(f"{path} is not plain text; unpack or convert it to .txt, .jsonl or .parquet first")
            files.append(_describe(path))
        elif path.exists():
            raise JobError(f"{path} is neither a file nor a folder; write its contents to a .txt or .jsonl file first")
        else:
            raise JobError(f"there is no file or folder {path}")
    if not files:
        raise JobError("weft data build needs at least one text file, .jsonl file or folder")
    return files


def _expanded(sources: Sequence[str | Path]) -> Iterator[str | Path]:
    """The sources, with a pattern such as notes-{000..007}.txt replaced by the files that it names."""
    for source in sources:
        if "{" in str(source):
            yield from expand(Path(source))
        else:
            yield source


def _is_store(folder: Path) -> bool:
    return (folder / TOKENS).exists() or (folder / PARTS).is_dir()


def _walk(folder: Path, out: Path) -> list[SourceFile]:
    """The source files below a folder, sorted by path. Folders that are links are not entered."""
    root = str(folder.resolve())
    excluded = out.stat() if out.exists() else None
    by_name: dict[str, SourceFile] = {}
    below = [""]
    while below:
        inside = below.pop()
        with os.scandir(os.path.join(root, inside)) as listing:
            entries = {entry.name: entry for entry in listing if not entry.name.startswith(".") or entry.name == PARTS}
        store = TOKENS in entries or (PARTS in entries and entries[PARTS].is_dir())
        if inside and store:  # the .json files of a store are not training data
            continue
        for name, entry in entries.items():
            if name != PARTS and entry.is_dir(follow_symlinks=False):
                if excluded is None or not os.path.samestat(entry.stat(follow_symlinks=False), excluded):
                    below.append(os.path.join(inside, name))
            elif _is_source(name) and entry.is_file():
                relative = os.path.join(inside, name)
                path = os.path.join(root, relative)
                by_name[relative] = _describe(path, os.path.realpath(path) if entry.is_symlink() else path)
    return [by_name[name] for name in sorted(by_name)]


def _is_source(name: str) -> bool:
    return _suffix(name) in TEXT_SUFFIXES or record_format(name) is not None


def _describe(path: str | Path, resolved: str | Path | None = None) -> SourceFile:
    """The file at a path; its kind follows from the name there, which a link may have given it."""
    stat, name = os.stat(path), os.path.basename(path)
    kind = record_format(name) or ("jsonl" if _suffix(name) in _JSONL else "text")
    return SourceFile(str(resolved or os.path.realpath(path)), kind, stat.st_size, stat.st_mtime_ns)


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


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
            weight += byte_range.size + _FILE_COST
            if weight >= part_bytes:
                parts.append(tuple(open_part))
                open_part, weight = [], 0
    if open_part:
        parts.append(tuple(open_part))
    return parts


def _byte_ranges(file: SourceFile, part_bytes: int) -> Iterator[ByteRange]:
    if file.kind in RECORD_FORMATS:
        sizes = group_sizes(file.path, file.kind, file.size)
        for i, size in enumerate(sizes):
            yield ByteRange(file.path, file.kind, i, i + 1, i == len(sizes) - 1, max(1, size))
        return
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


def records(byte_range: ByteRange) -> Iterator[tuple[int, Record]]:
    """Number and fields of each record of a byte range of .jsonl or of a table; blank lines are skipped. The number of
    a line is counted from the start of the range."""
    if byte_range.kind in RECORD_FORMATS:
        yield from read_records(byte_range.path, byte_range.kind, byte_range.start, byte_range.stop)
        return
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
            try:
                yield number, parse_record(line)
            except ValueError as error:
                raise bad_record(byte_range, number, str(error)) from None
        at = stop + 1


def texts(byte_range: ByteRange, field: str) -> Iterator[str]:
    """The text of each record."""
    for number, record in records(byte_range):
        if field not in record:
            has = ", ".join(list(record)[:8]) or "nothing"
            raise bad_record(
                byte_range,
                number,
                f"has no field {field!r} (it has {has}); name the one that holds the text: "
                "data.field of a job, --field of weft data build",
            )
        text = record[field]
        if not isinstance(text, str):
            raise bad_record(byte_range, number, f"has a {type(text).__name__} in the field {field!r}, not text")
        yield text


def bad_record(byte_range: ByteRange, number: int, what: str) -> JobError:
    """The error of a record, with its place in the file."""
    if byte_range.kind in RECORD_FORMATS:
        return JobError(f"{byte_range.path} row {number} {what}")
    before = 0
    with open(byte_range.path, "rb") as handle:
        left = byte_range.start
        while left and (block := handle.read(min(left, 1 << 20))):
            before += block.count(b"\n")
            left -= len(block)
    return JobError(f"{byte_range.path} line {before + number} {what}")
