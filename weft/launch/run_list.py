"""`weft runs` and `weft logs`: the runs of a folder with their state, and their output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.job.errors import Exit, JobError, WeftError
from weft.job.files.run_folder import RunDir, find_run
from weft.launch.claims import claims_of_runs
from weft.launch.policy import policy_process
from weft.launch.targets.known_targets import find_target
from weft.launch.targets.target import JobState, JobStatus, LaunchRecord, launch_folder
from weft.launch.targets.target_kinds import LAUNCH_TARGETS
from weft.watch.runs.run_catalog import RunEntry, find_runs

COLUMNS = ("name", "state", "target", "job_id", "last_step", "steps", "nodes", "ranks", "claim")
EXIT_STATES: dict[int | None, str] = {
    Exit.DONE: "done", Exit.PREEMPTED: "stopped", Exit.INTERRUPTED: "stopped", Exit.DIVERGED: "diverged",
}  # fmt: skip
STATUS_STATES = {
    "Done": "done", "Diverged": "diverged", "Failed": "failed", "Stopped, can resume": "stopped", "Running": "running",
    "Not finished": "not finished", "Not started": "not started",
}  # fmt: skip
"""States of runs that were not launched, by the status that the dashboard shows."""


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """A row for each run below a folder: launched ones, also before their first step, and others."""
    folder = folder.absolute()
    found = find_runs([folder]) if folder.is_dir() else {}
    launched = [path.parent.parent for path in sorted(folder.glob("**/launch/*.json"))]
    claims = claims_of_runs()
    waiting = [Path(run) for run in claims if folder in Path(run).parents]  # their first start may have no folder yet
    rows = []
    for path in dict.fromkeys([*found.values(), *launched, *waiting]):
        name = next((n for n, p in found.items() if p == path), path.name)
        rows.append(_with_claim(_row(name, path), claims.get(str(path))))
    return sorted(rows, key=lambda row: (row["state"] not in ("running", "queued"), row["name"]))


def _row(name: str, path: Path) -> dict[str, Any]:
    summary = RunEntry(name, path).summary()
    record = LaunchRecord.read(RunDir(path))
    row: dict[str, Any] = {
        "name": name, "state": STATUS_STATES.get(summary["status"], summary["status"]), "target": None, "job_id": None,
        "last_step": summary["step"] or 0, "steps": _integer(summary["steps"]), "nodes": None,
        "ranks": _integer(summary["world"]), "loss": summary["loss"], "path": str(path), "submitted": None,
        "exit_code": None, "detail": summary["detail"], "claim": None,
    }  # fmt: skip
    waits = policy_process(launch_folder(RunDir(path))) is not None  # for the rule of launch.when
    if record is None or record.target not in LAUNCH_TARGETS:
        return {**row, "state": "queued"} if waits else row
    try:
        status = find_target(record.target).status(record)
    except WeftError as error:  # such as settings of another version
        status = JobStatus(JobState.LOST, detail=str(error))
    ended = "queued" if waits else EXIT_STATES.get(status.exit_code, "failed")
    states = {JobState.QUEUED: "queued", JobState.RUNNING: "running", JobState.ENDED: ended, JobState.LOST: "lost"}
    return {
        **row, "state": states[status.state], "target": record.target, "job_id": record.job_id, "nodes": record.nodes,
        "ranks": record.ranks, "submitted": record.submitted, "exit_code": status.exit_code,
        "detail": status.detail or row["detail"],
    }  # fmt: skip


def _with_claim(row: dict[str, Any], claim: dict[str, Any] | None) -> dict[str, Any]:
    """The row with what the run has claimed of this machine, or waits for."""
    if claim is None:
        return row
    text = claim["asks_for"]
    if claim["position"] is None:
        return {**row, "claim": text}
    return {
        **row,
        "state": "queued",
        "claim": f"waits for {text}, number {claim['position']}",
        "detail": claim["reason"],
    }


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def show_runs(rows: list[dict[str, Any]], folder: str) -> str:
    """The rows as a table."""
    if not rows:
        return f"no runs in {folder}"
    cells = [[name.replace("_", " ") for name in COLUMNS]]
    cells += [["–" if row[name] is None else f"{row[name]}" for name in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(f"{cell:{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def read_logs(name: str, rank: int | None, runs_dir: str) -> Iterator[bytes]:
    """The output of a launched run, or the log file of a rank."""
    path = next((p for p in (Path(name), Path(runs_dir) / name) if LaunchRecord.read(RunDir(p))), None)
    record = LaunchRecord.read(RunDir(path)) if path is not None else None
    run = RunDir(path) if path is not None else find_run(name, runs_dir)
    if rank is not None:
        file = run.logs / f"rank-{rank}.log"
        if not file.is_file():
            ranks = sorted(int(p.stem[5:]) for p in run.logs.glob("rank-*.log") if p.stem[5:].isdigit())
            known = f"there are ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank has started"
            raise JobError(f"{run.path} has no log of rank {rank}; {known}")
        yield file.read_bytes()
        return
    if record is None:
        raise JobError(f"{run.path} was not started by weft launch; --rank N prints the log of a rank")
    offset, target = 0, find_target(record.target)
    while True:
        data, offset = target.output(record, offset)
        if not data:
            return
        yield data
