"""The runs below some folders: found by their files, with a summary of each."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from weft.hardware.catalog import safe_load
from weft.watch.figures.figure import number, unit_of
from weft.watch.report_summary import status_of
from weft.watch.runs.folder_files import last_lines, parse_object, read_inside, read_json, signature
from weft.watch.runs.metric_records import has_step
from weft.watch.runs.metric_series import MetricSeries

RUN_FILES = ("metrics.jsonl", "events.jsonl", "job.yaml", "plan.json")
MAX_DEPTH = 3
"""Folders between a folder of runs and a run, so that runs of a sweep are found."""
MAX_RUNS = 5000
MAX_FOLDERS = 20_000
SCAN_S = 2.0
"""Seconds between two searches for new runs."""
SILENT_S = 60.0
"""A run that has written nothing for this time, and for SILENT_STEPS of its steps, is not live."""
SILENT_STEPS = 20
SUMMARY_KEYS = ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_time_s", "peak_memory_gib")
ENDED = ("good", "bad")


class RunEntry:
    """One run folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.series = MetricSeries(folder)
        self._signature: tuple[Any, ...] = ()
        self._summary: dict[str, Any] = {}
        self._job: tuple[tuple[int, int, int], dict[str, Any]] = ((-1, -1, -1), {})

    def signature(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever one of the run's files does."""
        return tuple(signature(self.folder, name) for name in RUN_FILES)

    def job(self) -> dict[str, Any]:
        """job.yaml; empty if it is damaged."""
        at = signature(self.folder, "job.yaml")
        if at != self._job[0]:
            text = read_inside(self.folder, "job.yaml", limit=1 << 18)
            try:
                raw = safe_load(text)
            except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError):
                raw = None
            self._job = (at, raw if isinstance(raw, dict) else {})
        return self._job[1]

    def summary(self) -> dict[str, Any]:
        """One row of the list of runs, from the ends of the run's files."""
        now = self.signature()
        if now != self._signature:
            self._signature, self._summary = now, self._read_summary(now)
        updated = self._summary["updated"]
        step_time = self._summary["step_time_s"] or 0.0
        quiet = time.time() - updated > max(SILENT_S, SILENT_STEPS * step_time)
        live = self._summary["tone"] == "open" and self._summary["status"] != "Stopped, can resume" and not quiet
        word = self._summary["status"]
        if word == "Running or cut off":
            word = "Running" if live else "Not finished"
        return {**self._summary, "live": live, "status": word}

    def _read_summary(self, now: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
        events = [e for line in last_lines(self.folder, "events.jsonl") if (e := parse_object(line))]
        records = [r for line in last_lines(self.folder, "metrics.jsonl") if (r := parse_object(line)) and has_step(r)]
        last = records[-1] if records else {}
        status = status_of(events, records)
        plan = read_json(self.folder, "plan.json")
        train = self.job().get("train")
        evals = [v for e in events if e.get("event") == "eval" and (v := number(e.get("val_loss"))) is not None]
        return {
            "name": self.name,
            "path": str(self.folder),
            "status": status.word,
            "tone": status.tone,
            "detail": status.detail[:2000],
            "step": last.get("step"),
            "steps": number(train.get("steps")) if isinstance(train, dict) else None,
            **{key: number(last.get(key)) for key in SUMMARY_KEYS},
            "unit": unit_of(records),
            "val_loss": evals[-1] if evals else None,
            "world": number(plan.get("world")),
            "device": str(plan.get("device_name") or "")[:80],
            "layout": _layout(plan),
            "faults": sum(e.get("event") == "fault" for e in events),
            "updated": max(at[2] for at in now) / 1e9,
            "started": _time_of(events),
        }


class RunCatalog:
    """All runs below the given folders. Thread-safe."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.absolute() for root in roots]
        self.entries: dict[str, RunEntry] = {}
        self._lock = threading.Lock()
        self._scanned = -SCAN_S

    def refresh(self, now: bool = False) -> dict[str, RunEntry]:
        """The runs by name, searched for again at most every SCAN_S seconds."""
        with self._lock:
            if now or time.monotonic() - self._scanned >= SCAN_S:
                found = find_runs(self.roots)
                old = {entry.folder: entry for entry in self.entries.values()}
                self.entries = {
                    name: kept if (kept := old.get(folder)) and kept.name == name else RunEntry(name, folder)
                    for name, folder in found.items()
                }
                self._scanned = time.monotonic()
            return self.entries

    def get(self, name: str) -> RunEntry | None:
        """The run of this name; only names of the list are known."""
        return self.refresh().get(name)

    def summaries(self) -> list[dict[str, Any]]:
        """A row for each run, live ones first, then the last changed."""
        rows = [entry.summary() for entry in self.refresh().values()]
        return sorted(rows, key=lambda row: (not row["live"], -row["updated"], row["name"]))


def find_runs(roots: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name: their path below a root, with the root's name where several roots have one of that name."""
    found: list[tuple[str, str, Path]] = []
    for root in roots:
        if is_run(root):
            found.append((root.name, root.parent.name, root))
        else:
            found += [(path.relative_to(root).as_posix(), root.name, path) for path in _below(root)]
    names: dict[str, Path] = {}
    for name, root_name, path in found[:MAX_RUNS]:
        if path in names.values():
            continue
        unique, number = name, 1
        while unique in names:
            unique, number = (f"{root_name}/{name}" if number == 1 else f"{root_name}/{name}~{number}"), number + 1
        names[unique] = path
    return names


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run's files."""
    return any(signature(folder, name)[0] for name in ("metrics.jsonl", "events.jsonl", "job.yaml"))


def _below(root: Path) -> list[Path]:
    """Run folders below a root; links to other folders are not followed."""
    found: list[Path] = []
    level, left = [root], MAX_FOLDERS
    for _ in range(MAX_DEPTH):
        deeper: list[Path] = []
        for folder in level:
            try:
                with os.scandir(folder) as entries:
                    inner = sorted(
                        e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)
                    )
            except OSError:
                continue
            left -= len(inner)
            if left < 0:
                return found
            for name in inner:
                (found if is_run(folder / name) else deeper).append(folder / name)
        level = deeper
    return found


def _layout(plan: dict[str, Any]) -> str:
    axes = plan.get("axes")
    named = {**axes, "ep": plan.get("ep")} if isinstance(axes, dict) else {}
    degrees = {str(k): n for k, v in named.items() if (n := number(v)) is not None}
    parts = [f"{re.sub(r'[^a-z_]', '', name)} {degree:.0f}" for name, degree in degrees.items() if degree > 1]
    return " · ".join(parts[:8])


def _time_of(events: list[dict[str, Any]]) -> float | None:
    for event in reversed(events):
        if event.get("event") == "start":
            try:
                found = datetime.fromisoformat(str(event.get("time")))
            except ValueError:
                continue
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return None
