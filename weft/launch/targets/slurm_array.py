"""A job array of Slurm: the runs NAME-0, NAME-1 …, which are launched, followed and stopped together as NAME."""

from __future__ import annotations

import fcntl
import json
import shlex
from pathlib import Path

from weft.job.cluster import Cluster
from weft.job.errors import JobError
from weft.job.files.run_folder import RunDir
from weft.launch.targets.target import OUTPUT, LaunchRecord, read_exit_code

OFFSETS = "offsets.json"
"""Bytes of the runs' output that are in the array's, by run."""
MAX_READ = 1 << 20
FIXED = ("name", "runs_dir", "cluster")
"""Fields that all runs of an array share."""


def array_changes(cluster: Cluster) -> dict[str, list[str]]:
    """The changes to the job of each run."""
    found = {}
    for index, entry in enumerate(cluster.slurm.array):
        where = f"cluster.slurm.array[{index}]"
        try:
            words = shlex.split(entry)
        except ValueError as error:
            raise JobError(f"{where}={entry!r}: {error}; write for example 'optim.lr=1e-3 train.seed=1'") from None
        if fixed := next((word for word in words if word.partition("=")[0].split(".")[0] in FIXED), None):
            raise JobError(
                f"{where} sets {fixed}, but the runs of an array share {', '.join(FIXED)}; set it in the job"
            )
        found[where] = words
    return found


def array_runs(path: Path, cluster: Cluster) -> list[RunDir]:
    """The folders of the runs of the array at a path."""
    return [RunDir(path.with_name(f"{path.name}-{index}")) for index in range(len(cluster.slurm.array))]


def array_tasks(record: LaunchRecord) -> list[LaunchRecord]:
    """The records of an array's runs; none for any other record."""
    found = [LaunchRecord.read(run) for run in array_runs(Path(record.run), record.cluster)]
    return [task for task in found if task is not None and task.job_id.startswith(f"{record.job_id}_")]


def array_code(tasks: list[LaunchRecord]) -> int | None:
    """The exit code of an array: the largest of its runs, None until all have ended."""
    codes = [read_exit_code(task.launch_folder) for task in tasks]
    return None if None in codes else max(code for code in codes if code is not None)


def gather_output(record: LaunchRecord, tasks: list[LaunchRecord]) -> None:
    """Append the lines that the runs have printed since the last call to the array's output, after the run's name."""
    with (record.launch_folder / OFFSETS).open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of several that follow the array
        file.seek(0)
        offsets: dict[str, int] = json.loads(file.read() or "{}")
        with (record.launch_folder / OUTPUT).open("ab") as output:
            for task in tasks:
                name = Path(task.run).name
                output.writelines(f"{name}: ".encode() + line for line in _new_lines(task, offsets))
        file.truncate(0)
        file.write(json.dumps(offsets))


def _new_lines(task: LaunchRecord, offsets: dict[str, int]) -> list[bytes]:
    """The whole lines of a run's output after its offset, which is moved to their end."""
    name = Path(task.run).name
    try:
        with (task.launch_folder / OUTPUT).open("rb") as file:
            file.seek(offsets.get(name, 0))
            data = file.read(MAX_READ)
    except OSError:
        return []
    whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == MAX_READ else b"")
    offsets[name] = offsets.get(name, 0) + len(whole)
    return whole.splitlines(keepends=True)
