"""The small files of a run in its store: copied there with each checkpoint, and back to a node that lacks them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import AnyPath, replace, size_of

APPENDED_FILES = ("metrics.jsonl", "events.jsonl")
"""Files to which lines are appended: the longer of two copies has all lines of the other."""
FILES = ("job.yaml", "plan.json", *APPENDED_FILES)


def upload_history(run: RunDir, shared: AnyPath) -> None:
    """Copy the run's files beside its checkpoints in another place. One that cannot be copied now is copied with the
    next checkpoint."""
    for name in FILES:
        with contextlib.suppress(OSError):
            replace(shared / name, (run.path / name).read_bytes())


def fetch_history(run: RunDir, shared: AnyPath) -> None:
    """Copy metrics and events of earlier nodes here, where this node has fewer lines."""
    for name in APPENDED_FILES if shared != run.path else ():
        with contextlib.suppress(FileNotFoundError):
            if size_of(shared / name) > _local_size(run.path / name):
                replace(run.path / name, (shared / name).read_bytes())


def _local_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
