"""Records of a metrics file: their numbers by name, their order, samples of a large file, and answers made of them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

from weft.watch.runs.folder_files import MAX_LINE_BYTES, parse_object

Record = dict[str, Any]
Columns = dict[str, list[float | None]]

MAX_COLUMNS = 96
SAMPLE_BYTES = 1 << 12


def flatten(record: Record) -> dict[str, float]:
    """The numbers of a record by dotted name; of a list of numbers the mean."""
    found: dict[str, float] = {}
    for key, value in record.items():
        kind = type(value)
        if kind is float or kind is int:
            if -1e300 < value < 1e300:
                found[key] = value
        elif kind is dict:
            for inner, number in itertools.islice(flatten(value).items(), MAX_COLUMNS):
                found[f"{key}.{inner}"] = number
        elif kind is list and value and all(type(x) in (int, float) and abs(x) < 1e300 for x in value):
            found[key] = math.fsum(value) / len(value)
    return found


def has_step(record: Record | None) -> bool:
    """Whether a record is one of a step."""
    step = record.get("step") if record else None
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53


def as_timeline(records: list[Record]) -> list[Record]:
    """Records in order of steps: a step that was repeated replaces its first record and all after it."""
    kept: list[Record] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def lines_at(handle: int, end: int, points: int) -> Iterator[tuple[int, Record]]:
    """Records at even distances in the first `end` bytes of a file, with the place of each."""
    size = SAMPLE_BYTES
    for i in range(points):
        place = end * i // (points - 1)
        while size <= MAX_LINE_BYTES:
            start = max(0, min(place, end - size))
            data = os.pread(handle, size, start)
            if start and i == points - 1:  # the last complete line
                cut, stop = data[: data.rfind(b"\n")].rfind(b"\n"), data.rfind(b"\n")
                found = cut >= 0
            else:
                cut = data.find(b"\n") if start else -1
                stop = data.find(b"\n", cut + 1)
                found = stop >= 0 and not (start and cut < 0)
            if found:
                record = parse_object(data[cut + 1 : stop])
                if record is not None and has_step(record):
                    yield start + cut + 1, record
                break
            if len(data) < size:
                break
            size *= 4
        else:
            size = SAMPLE_BYTES


def answer_of(records: list[Record], exact: bool, read: int) -> dict[str, Any]:
    """Columns of whole records."""
    rows = [flatten(r) for r in records]
    names = list(itertools.islice(dict.fromkeys(name for row in rows for name in row), MAX_COLUMNS))
    if rows and "elapsed_s" not in names and "step_time_s" in names:
        times = [row["step_time_s"] for row in rows if "step_time_s" in row]
        first = next((row["wall_time"] for row in rows if "wall_time" in row), None)
        mean = math.fsum(times) / len(times)
        for row in rows:
            row["elapsed_s"] = row.get("wall_time", 0) - first if first is not None else row["step"] * mean
        names.append("elapsed_s")
    columns: Columns = {name: [row.get(name) for row in rows] for name in ["step", *names]}
    return {"columns": columns, "min": {}, "max": {}, "exact": exact, "sampled": not exact, "read": read}
