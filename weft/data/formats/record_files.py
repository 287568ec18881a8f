"""Records (objects with named fields) of JSONL, compressed JSONL, parquet, arrow and WebDataset files, one at a time.

pyarrow and zstandard are optional (`pip install weft[data]`) and imported only where a file needs them.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from weft.job.errors import JobError, MachineError

MAX_LINE_BYTES = 1 << 28
"""Longer lines of a compressed file are refused: a small file may unpack to any size."""

Record = dict[str, Any]


def optional_module(name: str, path: str) -> Any:
    """A module of the extra `data`; a MachineError that names the extra where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise MachineError(f"{path} needs {package}, which is not installed; run: pip install 'weft[data]'") from None


def parse_record(line: bytes) -> Record:
    """The object of a JSON line; a ValueError describes what is wrong."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {type(value).__name__}, not an object with named fields")
    return value


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turn what pyarrow and the decompressors raise for a damaged file into one sentence."""
    try:
        yield
    except (JobError, MachineError, MemoryError, FileNotFoundError, PermissionError):
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error, tarfile.TarError) as error:
        raise JobError(
            f"{path} cannot be read: {str(error).splitlines()[0][:200] if str(error) else error!r}"
        ) from None
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("pyarrow", "zstandard", "zstd"):
            raise JobError(f"{path} cannot be read: {str(error).splitlines()[0][:200]}") from None
        raise


def _lines(path: str, opened: Callable[[BinaryIO], Any]) -> Iterator[tuple[int, Record]]:
    with open(path, "rb") as file, opened(file) as unpacked:
        reader = io.BufferedReader(unpacked)
        number = 0
        while line := reader.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise JobError(f"{path} line {number} has more than {MAX_LINE_BYTES >> 20} MiB")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                try:
                    yield number, parse_record(line)
                except ValueError as error:
                    raise JobError(f"{path} line {number} {error}") from None


def _zst_lines(path: str, first: int, end: int) -> Iterator[tuple[int, Record]]:
    zstandard = optional_module("zstandard", path)
    # a window of 2 GiB, which `zstd --long` may ask for, is the most that is allocated
    yield from _lines(path, lambda file: zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(
        file, read_across_frames=True))  # fmt: skip


def _gz_lines(path: str, first: int, end: int) -> Iterator[tuple[int, Record]]:
    yield from _lines(path, lambda file: gzip.GzipFile(fileobj=file))


def _parquet_rows(path: str, first: int, end: int) -> Iterator[tuple[int, Record]]:
    parquet = optional_module("pyarrow.parquet", path)
    with parquet.ParquetFile(path) as file:
        number = sum(file.metadata.row_group(i).num_rows for i in range(first))
        for batch in file.iter_batches(batch_size=256, row_groups=list(range(first, end))):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _parquet_groups(path: str) -> list[int]:
    parquet = optional_module("pyarrow.parquet", path)
    with parquet.ParquetFile(path) as file:
        return [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]


@contextmanager
def _arrow_batches(path: str) -> Iterator[Iterator[Any]]:
    """The record batches of an arrow file or stream, mapped into memory: a batch that is not used is not read."""
    arrow, ipc = optional_module("pyarrow", path), optional_module("pyarrow.ipc", path)
    with arrow.memory_map(path) as file:
        with open(path, "rb") as start:
            is_file = start.read(6) == b"ARROW1"
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        yield (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)


def _arrow_rows(path: str, first: int, end: int) -> Iterator[tuple[int, Record]]:
    with _arrow_batches(path) as batches:
        number = 0
        for index, batch in enumerate(batches):
            if index >= end:
                return
            for start_row in range(0, batch.num_rows if index >= first else 0, 256):
                for offset, row in enumerate(batch.slice(start_row, 256).to_pylist()):
                    yield number + start_row + offset + 1, row
            number += batch.num_rows


def _arrow_groups(path: str) -> list[int]:
    with _arrow_batches(path) as batches:
        return [batch.nbytes for batch in batches]


def _tar_samples(path: str, first: int, end: int) -> Iterator[tuple[int, Record]]:
    """Samples of a shard of WebDataset: members that follow one another with the same name up to its first dot.
    NAME.txt is the field text, and NAME.json an object with fields; other members are skipped."""
    number, before, record = 0, "", Record()
    opening: Any = gzip.open if path.lower().endswith(".gz") else open
    with opening(path, "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as shard:
        for member in shard:
            folder, _, file = member.name.rpartition("/")
            stem, _, ending = file.partition(".")
            if not member.isreg() or not stem or ending.lower() not in ("txt", "text", "json"):
                continue
            if member.size > MAX_LINE_BYTES:
                raise JobError(f"{path}: {member.name} has more than {MAX_LINE_BYTES >> 20} MiB")
            if before and before != f"{folder}/{stem}":
                number += 1
                yield number, record
                record = Record()
            before, content = f"{folder}/{stem}", shard.extractfile(member)
            data = b"" if content is None else content.read()
            try:
                record |= parse_record(data) if ending.lower() == "json" else {"text": data.decode("utf-8")}
            except ValueError as error:
                problem = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
                raise JobError(f"{path}: {member.name} {problem}") from None
        opened.seek(shard.offset)
        if opened.read(512) != bytes(512):
            raise JobError(f"{path} cannot be read: it ends before the end marker of a tar file")
        while opening is gzip.open and opened.read(1 << 20):  # it is checked by the sum at its end
            pass
    if before:
        yield number + 1, record


@dataclass(frozen=True)
class RecordFormat:
    """A file format of records."""

    rows: Callable[[str, int, int], Iterator[tuple[int, Record]]]
    """Number and fields of the rows in groups first … end - 1 of a file."""
    groups: Callable[[str], list[int]] | None = None
    """Bytes of each group of rows that can be read on its own; None: a file is one group."""


RECORD_FORMATS: dict[str, RecordFormat] = {
    ".jsonl.zst": RecordFormat(_zst_lines),
    ".ndjson.zst": RecordFormat(_zst_lines),
    ".jsonl.gz": RecordFormat(_gz_lines),
    ".ndjson.gz": RecordFormat(_gz_lines),
    ".parquet": RecordFormat(_parquet_rows, _parquet_groups),
    ".arrow": RecordFormat(_arrow_rows, _arrow_groups),
    ".feather": RecordFormat(_arrow_rows, _arrow_groups),
    ".tar": RecordFormat(_tar_samples),
    ".tar.gz": RecordFormat(_tar_samples),
}
"""By the end of a file's name."""


def record_format(path: str | Path) -> str | None:
    """The ending of a file of records other than plain JSONL, or None."""
    name = Path(path).name.lower()
    return next((ending for ending in RECORD_FORMATS if name.endswith(ending)), None)


def read_records(path: str, ending: str, first: int, end: int) -> Iterator[tuple[int, Record]]:
    """Number and fields of the rows of some groups of a file."""
    with _readable(path):
        yield from RECORD_FORMATS[ending].rows(path, first, end)


def group_sizes(path: str, ending: str, size: int) -> list[int]:
    """Bytes of each group of rows of a file of `size` bytes."""
    groups = RECORD_FORMATS[ending].groups
    if groups is None:
        return [size]
    with _readable(path):
        return groups(path) or []
