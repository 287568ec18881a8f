"""Records of a task in files: JSONL, TSV, parquet or arrow, split into training and held-out ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.formats.record_files import Record, group_sizes, parse_record, read_records, record_format
from weft.data.shard_patterns import expand
from weft.data.tokenizer import Tokenizer
from weft.job.data import PAD_MULTIPLE
from weft.job.errors import JobError

HELD_OUT = ("val", "dev", "test")
"""Beginnings of the names of files, or of their parts, that hold held-out records."""


@dataclass(frozen=True)
class Padding:
    """How samples of different lengths become one batch: by key the value that fills them up."""

    values: dict[str, int]
    limit: int
    """Longest sample."""

    def pad(self, key: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The arrays with the length of the longest, rounded up to a multiple of PAD_MULTIPLE below the limit."""
        if key not in self.values:
            return arrays
        longest = max(len(array) for array in arrays)
        length = max(longest, min(-(-longest // PAD_MULTIPLE) * PAD_MULTIPLE, self.limit))
        fill = self.values[key]
        return [np.pad(array, (0, length - len(array)), constant_values=fill) for array in arrays]


def read_task_records(source: str, fields: tuple[str, ...], val_fraction: float) -> tuple[list[Record], list[Record]]:
    """Training and held-out records with these fields. A file whose name has val, dev or test in it is held out; if
    there is none, the last `val_fraction` of all records is."""
    train: list[Record] = []
    held: list[Record] = []
    for path in _files(source):
        words = path.stem.lower().replace("-", ".").replace("_", ".").split(".")
        found = held if any(word.startswith(HELD_OUT) for word in words) else train
        found += [_checked(record, fields, f"{path} record {number}") for number, record in _rows(path, fields)]
    if not held and val_fraction > 0 and len(train) > 1:
        count = min(len(train) - 1, max(1, round(len(train) * val_fraction)))
        train, held = train[:-count], train[-count:]
    if not train:
        raise JobError(f"data.source {source} has no records to train on")
    return train, held


def _files(source: str) -> list[Path]:
    """The files of records: the source itself, those of a pattern such as part-{0..7}.jsonl, or those below folders."""
    files: list[Path] = []
    for path in expand(Path(source)):
        inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p)) if path.is_dir() else []
        if not inside and not path.is_file():
            raise JobError(f"data.source {path} is no file or folder of .jsonl, .tsv, .parquet or .arrow files")
        files += inside or [path]
    return files


def _kind(path: Path) -> str | None:
    plain = {".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv"}
    return record_format(path) or plain.get(path.suffix.lower())


def _rows(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
    """Number and fields of each record of a file."""
    kind = _kind(path)
    if kind is None:
        raise JobError(f"{path} is not a file of records; write .jsonl, .tsv, .parquet or .arrow")
    if kind not in ("jsonl", "tsv"):
        yield from read_records(str(path), kind, 0, max(1, len(group_sizes(str(path), kind, path.stat().st_size))))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = parse_record(line) if kind == "jsonl" else _columns(line, fields)
            except ValueError as error:
                raise JobError(f"{path} line {number} {error}") from None
            if kind == "jsonl" or number > 1 or tuple(record.values()) != fields:  # a TSV may begin with a header
                yield number, record


def _columns(line: bytes, fields: tuple[str, ...]) -> Record:
    try:
        cells = line.decode("utf-8").rstrip("\r\n").split("\t")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    if len(cells) != len(fields):
        raise ValueError(f"has {len(cells)} columns; {' and '.join(fields)} are {len(fields)}")
    return dict(zip(fields, cells, strict=True))


def _checked(record: Record, fields: tuple[str, ...], where: str) -> Record:
    return {field: _value(record, field, where) for field in fields}


def _value(record: Record, field: str, where: str) -> Any:
    """The value of a field; `translation.en` is the field en of the field translation."""
    value: Any = record
    for part in (field,) if field in record else field.split("."):
        if not isinstance(value, dict) or part not in value:
            raise JobError(f"{where} has no field {field!r}; it has {', '.join(map(str, record))}")
        value = value[part]
    return value


def text_tokens(tokenizer: Tokenizer, text: Any, limit: int, where: str) -> np.ndarray:
    """The tokens of a text with those that the tokenizer puts around it, at most `limit` of them; the last stays."""
    if not isinstance(text, str):
        raise JobError(f"{where} is a {type(text).__name__}, not a text")
    tokens = np.asarray(tokenizer.encode_whole(text), dtype=np.int64)
    return tokens if tokens.size <= limit else np.concatenate([tokens[: limit - 1], tokens[-1:]])
