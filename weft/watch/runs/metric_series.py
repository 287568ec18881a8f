"""The metrics of a run as columns: read once by byte offset, and kept in a bounded number of buckets.

A run of any length needs the same memory. Records of a short range are read again from the file, so they are exact.
"""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from weft.watch.runs.folder_files import MAX_LINE_BYTES, open_inside, parse_object
from weft.watch.runs.metric_records import (
    MAX_COLUMNS,
    Columns,
    Record,
    answer_of,
    as_timeline,
    flatten,
    has_step,
    lines_at,
)

MAX_BUCKETS = 2048
CHUNK_BYTES = 1 << 18
SPARSE_BYTES = 4 << 20
"""A file with more unread bytes is sampled first and read in the background."""
EXACT_BYTES = 8 << 20
"""Largest part of a file that is read again for one answer."""
GROWING = ("tokens", "wall_time", "elapsed_s")
"""Columns that grow with the step: a bucket shows the last value, of others the mean."""


class MetricSeries:
    """The columns of one metrics.jsonl, which may still grow. Thread-safe."""

    def __init__(self, folder: Path, name: str = "metrics.jsonl") -> None:
        self.folder, self.name = folder, name
        self.lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.inode = self.offset = self.n = 0
        self.skipping = False
        """Inside a line that is too long."""
        self.size = 1
        """Records in a full bucket."""
        self.first, self.last, self.count = (np.zeros(MAX_BUCKETS, np.int64) for _ in range(3))
        self.at, self.end = (np.zeros(MAX_BUCKETS, np.int64) for _ in range(2))
        """Bytes of the file that hold a bucket's records."""
        self.columns: dict[str, np.ndarray[Any, Any]] = {}
        """By name: sum, count, minimum and maximum of each bucket."""
        self.start_time: float | None = None
        self.elapsed = 0.0

    # reading the file

    def unread(self) -> int:
        """Bytes that were not read yet."""
        with open_inside(self.folder, self.name) as handle:
            return 0 if handle is None else max(0, os.fstat(handle).st_size - self.offset)

    def update(self, limit: int | None = None) -> bool:
        """Read complete lines that were appended since, at most about `limit` bytes. Returns whether more are left."""
        with self.lock, open_inside(self.folder, self.name) as handle:
            if handle is None:
                return False
            found = os.fstat(handle)
            if found.st_ino != self.inode or found.st_size < self.offset:  # a new file, such as after --fresh
                self._reset()
                self.inode = found.st_ino
            stop = found.st_size if limit is None else min(found.st_size, self.offset + limit)
            while self.offset < stop:
                before = self.offset
                self._append(self._next_lines(handle))
                if self.offset == before:
                    return False
            return self.offset < found.st_size

    def _next_lines(self, handle: int) -> list[tuple[int, int, bytes]]:
        """The next complete lines with their first and last byte; moves the offset behind them."""
        size = CHUNK_BYTES
        while True:
            data = os.pread(handle, size, self.offset)
            cut = data.rfind(b"\n") + 1
            if cut or len(data) < size or size > MAX_LINE_BYTES:
                break
            size *= 4
        if not cut:
            if len(data) > MAX_LINE_BYTES:  # a line that is too long: skip what was read of it
                self.offset += len(data)
                self.skipping = True
            return []
        lines, position = [], self.offset
        for line in data[: cut - 1].split(b"\n"):
            lines.append((position, position + len(line) + 1, line))
            position += len(line) + 1
        self.offset = position
        if self.skipping:
            self.skipping = False
            lines.pop(0)
        return lines

    def _append(self, lines: list[tuple[int, int, bytes]]) -> None:
        """Add lines to the buckets, in parts in which steps grow."""
        part: list[tuple[int, int, Record]] = []
        reached = int(self.last[self.n - 1]) if self.n else -1
        for start, end, line in lines:
            record = parse_object(line) if len(line) <= MAX_LINE_BYTES else None
            if record is None or not has_step(record):
                continue
            if record["step"] <= reached:
                self._add(part)
                part = []
                self._roll_back(record["step"])
            reached = record["step"]
            part.append((start, end, record))
        self._add(part)

    def _roll_back(self, step: int) -> None:
        """Drop this step and all after it."""
        k = int(np.searchsorted(self.last[: self.n], step))
        if k >= self.n:
            return
        again: list[tuple[int, int, Record]] = []
        if self.first[k] < step:  # the bucket holds earlier records too
            with open_inside(self.folder, self.name) as handle:
                if handle is not None:
                    length = min(EXACT_BYTES, int(self.end[k] - self.at[k]))
                    again = [x for x in self._records(handle, int(self.at[k]), length) if x[2]["step"] < step]
        self.n = k
        self.count[k:] = 0
        for column in self.columns.values():
            column[:, k:] = _EMPTY
        self._add(again)

    def _records(self, handle: int, start: int, length: int) -> list[tuple[int, int, Record]]:
        """The time line of the records in a part of the file."""
        kept: list[tuple[int, int, Record]] = []
        for line in os.pread(handle, length, start).split(b"\n"):
            record = parse_object(line) if len(line) <= MAX_LINE_BYTES else None
            if record is not None and has_step(record):
                while kept and kept[-1][2]["step"] >= record["step"]:
                    kept.pop()
                kept.append((start, start + len(line) + 1, record))
            start += len(line) + 1
        return kept

    # buckets

    def _add(self, part: list[tuple[int, int, Record]]) -> None:
        while part:
            if self.n == MAX_BUCKETS and self.count[self.n - 1] >= self.size:
                self._merge_pairs()
            free = self.size - int(self.count[self.n - 1]) if self.n else 0
            fits = max(0, free) + (MAX_BUCKETS - self.n) * self.size
            self._add_columns(part[:fits], max(0, free))
            part = part[fits:]

    def _add_columns(self, part: list[tuple[int, int, Record]], free: int) -> None:
        rows = [self._numbers(record) for _, _, record in part]
        index = np.where(np.arange(len(part)) < free, self.n - 1, self.n + (np.arange(len(part)) - free) // self.size)
        cuts = np.flatnonzero(np.diff(index, prepend=-1))
        buckets = index[cuts]
        ends = np.append(cuts[1:], len(part)) - 1
        steps = np.array([record["step"] for _, _, record in part])
        fresh = self.count[buckets] == 0
        self.first[buckets[fresh]] = steps[cuts][fresh]
        self.at[buckets[fresh]] = np.array([start for start, _, _ in part])[cuts][fresh]
        self.last[buckets] = steps[ends]
        self.end[buckets] = np.array([end for _, end, _ in part])[ends]
        self.count[buckets] += ends - cuts + 1
        for name in {name: None for row in rows for name in row}:
            if name not in self.columns:
                if len(self.columns) >= MAX_COLUMNS:
                    continue
                self.columns[name] = np.repeat(_EMPTY, MAX_BUCKETS, axis=1)
            values = np.array([row.get(name, math.nan) for row in rows])
            there = ~np.isnan(values)
            column = self.columns[name]
            column[0, buckets] += np.add.reduceat(np.where(there, values, 0), cuts)
            column[1, buckets] += np.add.reduceat(there.astype(float), cuts)
            low, high = np.where(there, values, np.inf), np.where(there, values, -np.inf)
            column[2, buckets] = np.minimum(column[2, buckets], np.minimum.reduceat(low, cuts))
            column[3, buckets] = np.maximum(column[3, buckets], np.maximum.reduceat(high, cuts))
        self.n = int(buckets[-1]) + 1

    def _numbers(self, record: Record) -> dict[str, float]:
        row = flatten(record)
        row.pop("step", None)
        self.elapsed += row.get("step_time_s", 0.0)
        now = row.get("wall_time")
        if now is not None and self.start_time is None:
            self.start_time = now - self.elapsed
        row["elapsed_s"] = self.elapsed if now is None or self.start_time is None else now - self.start_time
        return row

    def _merge_pairs(self) -> None:
        half = self.n // 2
        self.first[:half], self.at[:half] = self.first[0 : self.n : 2], self.at[0 : self.n : 2]
        self.last[:half], self.end[:half] = self.last[1 : self.n : 2], self.end[1 : self.n : 2]
        self.count[:half] = self.count[: self.n].reshape(-1, 2).sum(axis=1)
        self.count[half:] = 0
        for column in self.columns.values():
            column[:, :half] = _reduce(column[:, : self.n], np.arange(0, self.n, 2))
            column[:, half:] = _EMPTY
        self.n, self.size = half, self.size * 2

    # answers

    def query(self, start: int = 0, stop: int | None = None, points: int = 1000) -> dict[str, Any]:
        """Columns of the steps in [start, stop]: every record if there are at most `points`, else at most `points`
        means with `min` and `max`. A large file that was not read yet gives a sample of its records (`exact` false)."""
        if self.unread() > SPARSE_BYTES:
            records = [
                r for r in self.sample(max(points, 2)) if r["step"] >= start and (stop is None or r["step"] <= stop)
            ]
            return answer_of(records[-points:], exact=False, read=self.offset)
        self.update()
        with self.lock:
            low = int(np.searchsorted(self.last[: self.n], start))
            high = self.n if stop is None else int(np.searchsorted(self.first[: self.n], stop, side="right"))
            if high <= low:
                return answer_of([], exact=True, read=self.offset)
            begin, length = int(self.at[low]), int(self.end[high - 1] - self.at[low])
            near = int(self.count[low:high].sum()) <= points + 2 * self.size
            if self.size > 1 and near and length <= EXACT_BYTES:
                records = self._exact(begin, length, start, stop)
                if len(records) <= points:
                    return answer_of(records, exact=True, read=self.offset)
            return self._buckets(low, high, points)

    def _exact(self, begin: int, length: int, start: int, stop: int | None) -> list[Record]:
        with open_inside(self.folder, self.name) as handle:
            if handle is None:
                return []
            found = [record for _, _, record in self._records(handle, begin, length)]
        elapsed = np.interp([r["step"] for r in found], self.last[: self.n], self.columns["elapsed_s"][3, : self.n])
        for record, seconds in zip(found, elapsed.tolist(), strict=True):
            record["elapsed_s"] = seconds
        return [r for r in found if r["step"] >= start and (stop is None or r["step"] <= stop)]

    def _buckets(self, low: int, high: int, points: int) -> dict[str, Any]:
        cuts = np.arange(0, high - low, -(-(high - low) // points))
        ends = np.append(cuts[1:], high - low) - 1
        columns: Columns = {"step": self.last[low:high][ends].tolist()}
        lows: Columns = {}
        highs: Columns = {}
        for name, column in self.columns.items():
            total, count, least, most = _reduce(column[:, low:high], cuts)
            if not count.any():
                continue
            missing = count == 0
            if name in GROWING:
                columns[name] = _plain(most, missing)
            else:
                columns[name] = _plain(total / np.maximum(count, 1), missing)
                lows[name], highs[name] = _plain(least, missing), _plain(most, missing)
        if exact := self.size == 1 and len(cuts) == high - low:
            lows, highs = {}, {}
        return {"columns": columns, "min": lows, "max": highs, "exact": exact, "sampled": False, "read": self.offset}

    def sample(self, points: int) -> list[Record]:
        """About `points` (at least 2) records at even distances in the file, with the first and the last."""
        with open_inside(self.folder, self.name) as handle:
            if handle is None:
                return []
            end = os.fstat(handle).st_size
            found = list(lines_at(handle, end, points))
        by_place = dict(found)
        return as_timeline([by_place[place] for place in sorted(by_place)])


_EMPTY = np.array([[0.0], [0.0], [np.inf], [-np.inf]])


def _reduce(column: np.ndarray[Any, Any], cuts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sum, count, minimum and maximum of groups of buckets."""
    return np.stack([
        np.add.reduceat(column[0], cuts), np.add.reduceat(column[1], cuts),
        np.minimum.reduceat(column[2], cuts), np.maximum.reduceat(column[3], cuts),
    ])  # fmt: skip


def _plain(values: np.ndarray[Any, Any], missing: np.ndarray[Any, Any]) -> list[float | None]:
    return [None if gone else value for value, gone in zip(values.tolist(), missing.tolist(), strict=True)]
