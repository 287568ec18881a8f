"""The files that the start of a run writes, and how a refused start is undone without touching anything else."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from weft.job.errors import JobError, file_named
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_yaml
from weft.job.schema import Job
from weft.planner import Plan

START_FILES = (
    ".lock", ".secret", ".supervisor.json", "metrics.jsonl", "events.jsonl", "slices.json",
    "logs/rank-*.log", "logs/failure-*.json", "logs/watch.log",
)  # fmt: skip
"""What a start that is refused before its first step leaves in a new folder."""


@dataclass
class RunFiles:
    """job.yaml and plan.json of a start, with what stood there before."""

    run: RunDir
    created: bool
    """Whether this start created the run folder."""
    before: dict[Path, bytes | None] = field(default_factory=dict)
    written: dict[Path, bytes] = field(default_factory=dict)
    metrics_bytes: int = 0

    def write(self, job: Job, plan: Plan) -> None:
        """Write plan.json and job.yaml, each atomically."""
        check_is_run(self.run)
        self.metrics_bytes = _size(self.run.metrics)
        for path, text in ((self.run.plan, plan.dumps()), (self.run.job, dump_yaml(job))):
            self.before[path] = path.read_bytes() if path.exists() else None
            self.written[path] = text.encode()
            write_atomically(path, self.written[path])

    def undo(self) -> None:
        """After the ranks refused the job: restore both files, unless steps or checkpoints were written since.

        A folder that this start created is removed if nothing else is in it.
        """
        first = all(content is None for content in self.before.values())
        kept = _has_entries(self.run.checkpoints) or self.run.samples.exists()
        if _size(self.run.metrics) > self.metrics_bytes or (first and kept):
            return
        for path, content in self.before.items():
            if content is not None:
                write_atomically(path, content)
            elif path.is_file() and not path.is_symlink() and (path == self.run.plan or self._is_ours(path)):
                path.unlink()
        if self.created:
            _remove_start_files(self.run)

    def _is_ours(self, path: Path) -> bool:
        return path.read_bytes() == self.written[path]


def write_job_and_plan(run: RunDir, job: Job, plan: Plan) -> None:
    """Write job.yaml and plan.json of a run."""
    RunFiles(run, created=False).write(job, plan)


def check_is_run(run: RunDir) -> None:
    """Refuse a folder whose files or subfolders have the names of a run's, but were not written by Weft."""
    for path in (run.job, run.plan, run.metrics, run.events, run.slices, run.pipeline):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise JobError(f"{path} is not a regular file; give the run another name=")
    for path in (run.logs, run.checkpoints, run.samples, run.traces, run.compiled):
        if os.path.lexists(path) and not path.is_dir():
            raise JobError(f"{path} is not a folder; give the run another name=")
    if run.job.exists() and not run.plan.exists():
        raise JobError(f"{run.job} exists, but {run.path} is not the folder of a run; give the run another name=")
    if run.plan.exists() and not run.job.exists():
        try:
            Plan.from_json(json.loads(run.plan.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise JobError(f"{run.plan} is not a plan of Weft; give the run another name=") from None
    if not run.job.exists() and not run.plan.exists():
        content = {run.metrics: {"step", "loss"}, run.events: {"event"}, run.slices: {"ranks"}, run.report: {"any"}}
        for path, keys in content.items():  # a refused start leaves all but a report
            if _size(path) and not keys <= _first_keys(path):
                raise JobError(f"{path} was not written by Weft; give the run another name=")


def _first_keys(path: Path) -> set[str]:
    """The keys of the JSON object in the first line of a file."""
    try:
        with path.open("rb") as file:
            return set(json.loads(file.readline()))
    except (OSError, ValueError, TypeError, RecursionError):
        return set()


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(f".{secrets.token_hex(4)}")  # several nodes may write at once
    try:
        with file_named(path):
            temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def keep_earlier_run(run: RunDir, log: Callable[[str], None]) -> None:
    """Move what an earlier run of this name left to another folder."""
    content = [p for p in run.path.iterdir() if p.name != ".lock"]
    if not content:
        return
    number = 1
    while (old := run.path.with_name(f"{run.path.name}.old-{number}")).exists():
        number += 1
    old.mkdir()
    for path in content:
        path.rename(old / path.name)
    log(f"the earlier run is kept in {old}")


def _remove_start_files(run: RunDir) -> None:
    """Remove the known files of a start and folders that are empty then; links are not followed."""
    with contextlib.suppress(OSError):
        for pattern in START_FILES:
            for path in run.path.glob(pattern):
                if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
                    path.unlink()
        for folder in (run.logs, run.checkpoints, run.compiled, run.path):
            if folder.is_dir() and not folder.is_symlink() and not _has_entries(folder):
                folder.rmdir()


def _has_entries(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
