"""`weft launch`: plan a job for a target, submit it, and follow it to its end."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.job.errors import Exit, FitError, JobError, MachineError, WeftError
from weft.job.extensions import import_extensions
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_given, parse_job, read_fields
from weft.job.schema import Job
from weft.launch.run_files import check_is_run
from weft.launch.targets.known_targets import find_target, resolve_target
from weft.launch.targets.process_target import ProcessTarget
from weft.launch.targets.target import EXIT_FILE, SUBMITTED_JOB, JobState, LaunchRecord, LaunchRequest, Target
from weft.planner import RUNNABLE, Plan, check, check_fits
from weft.planner.make_plan import best_plan, start_plan

POLL_S = 0.2
ATTACH_LINES = 20
"""Lines of the earlier output that `weft attach` prints."""
ACTIVE = (JobState.QUEUED, JobState.RUNNING)


def plan_for(
    name: str, overrides: Sequence[str], on: str | None, attached: bool = True
) -> tuple[Target, LaunchRequest]:
    """The target, and the job planned for its cluster. Refuses what cannot run there."""
    target, job = _read(name, overrides, on)
    target.check_settings(job.cluster)
    plan = _plan(job, target.world(job.cluster))
    for where, changes in target.changes(job.cluster).items():
        try:
            changed = _read(name, [*overrides, *changes], on)[1]
            _plan(changed, target.world(changed.cluster))
        except (JobError, FitError) as error:
            raise type(error)(f"{where}: {error}") from None
    return target, LaunchRequest(job, plan, Path.cwd(), attached)


def _read(name: str, overrides: Sequence[str], on: str | None) -> tuple[Target, Job]:
    """The target, and the job with the fields of the target's cluster."""
    raw = read_fields(name, overrides)
    import_extensions(raw.get("extensions"))
    cluster = raw.get("cluster", {})
    target, section = resolve_target(on, cluster if isinstance(cluster, dict) else {})
    raw["cluster"] = target.complete(section) if isinstance(cluster, dict) else cluster
    return target, parse_job(raw)


def _plan(job: Job, world: int | None) -> Plan:
    """The plan for the job's cluster; a FitError if no layout fits its devices."""
    start = start_plan(job, world)
    planned, plan, found = best_plan(start)
    check(planned, plan, RUNNABLE)
    check_fits(planned, plan)
    if found is not None and len(found) == 0 and plan.device != "cpu":  # the memory of other CPU nodes is unknown
        raise FitError(
            f"no layout fits: the smallest, {plan.layout()}, needs {found.smallest_gib:.1f} GiB a rank, but "
            f"{found.estimator.limit_gib:.1f} GiB of {plan.device_name} are usable; weft plan shows what would fit"
        )
    return plan


def submit(target: Target, request: LaunchRequest) -> LaunchRecord:
    """Write the files of a launch and submit it."""
    submission = target.build(request)
    run, folder = request.run, request.launch_folder
    earlier = LaunchRecord.read(run)
    if earlier is not None and find_target(earlier.target).status(earlier).state in ACTIVE:
        raise JobError(
            f"{request.job.name} is already {earlier.target} job {earlier.job_id}; end it with weft stop, or give "
            "another name="
        )
    check_is_run(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EXIT_FILE).unlink(missing_ok=True)
    files = {SUBMITTED_JOB: dump_given(request.job), **submission.files}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    submitted = time.time()
    try:
        job_id = target.submit(request, submission)
    except WeftError:
        if earlier is None:
            _remove_files(run, folder, files)
        raise
    settings: dict[str, Any] = request.cluster.model_dump(mode="json", exclude_defaults=True)
    record = LaunchRecord(
        target.name, job_id, str(run.path), socket.gethostname(), submitted, request.nodes, request.plan.world, settings
    )
    (folder / "record.json").write_text(record.to_json(), encoding="utf-8")
    return record


def _remove_files(run: RunDir, folder: Path, files: Iterable[str]) -> None:
    """Remove the files of a launch that was refused, and folders that are empty then."""
    for name in files:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
        run.path.rmdir()
        run.path.parent.rmdir()


def attach(record: LaunchRecord, log: Callable[[str], None]) -> int:
    """Print the last lines of a launched run, and follow it until it ends. Returns its exit code; Ctrl-C only ends the
    printing."""
    target, offset, end = find_target(record.target), 0, b""
    while True:
        data, offset = target.output(record, offset)
        if not data:
            break
        end = b"".join((end + data).splitlines(keepends=True)[-ATTACH_LINES:])
    _write(end)
    return follow(record, log, offset, own=False)


def follow(
    record: LaunchRecord,
    log: Callable[[str], None],
    offset: int = 0,
    meanwhile: Callable[[], None] = lambda: None,
    own: bool = True,
) -> int:
    """Print the output of a launched run until it ends. Returns its exit code.

    Ctrl-C interrupts processes that this command has started (`own`); other runs continue. `meanwhile` is called
    repeatedly.
    """
    target = find_target(record.target)
    waiting = False
    while True:
        try:
            status = target.status(record)
            if status.state == JobState.QUEUED and not waiting:
                waiting = True
                log(f"{record.target} job {record.job_id} is queued{f': {status.detail}' if status.detail else ''}")
            offset = _print_output(target, record, offset)
            if status.state not in ACTIVE:
                break
            meanwhile()
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            if not own or not isinstance(target, ProcessTarget):
                log(f"the run continues as {record.target} job {record.job_id}: weft attach, logs and stop work on it")
                return int(Exit.INTERRUPTED)
            target.interrupt(record)
    _print_output(target, record, offset)
    if status.exit_code is None:
        name = Path(record.run).name
        detail = f" ({status.detail})" if status.detail else ""
        log(f"weft: {record.target} job {record.job_id} is gone without an exit code{detail}; weft logs {name}")
        return int(Exit.MACHINE)
    return status.exit_code


def _print_output(target: Target, record: LaunchRecord, offset: int) -> int:
    while True:
        data, offset = target.output(record, offset)
        if not data:
            return offset
        _write(data)


def _write(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def stop(record: LaunchRecord, log: Callable[[str], None], kill: bool, timeout_s: float) -> int:
    """Ask a launched run to save and stop, and wait for its end. Returns an exit code."""
    target = find_target(record.target)
    if (status := target.status(record)).state not in ACTIVE:
        if status.state == JobState.LOST and status.detail:
            raise MachineError(f"the state of {Path(record.run).name} is unknown: {status.detail}")
        end = "without an exit code" if status.exit_code is None else f"(exit code {status.exit_code})"
        raise JobError(f"{Path(record.run).name} has already ended {end}")
    (target.kill if kill else target.stop)(record)
    deadline = time.monotonic() + timeout_s
    while target.status(record).state in ACTIVE:
        if time.monotonic() > deadline:
            log(f"weft: {Path(record.run).name} has not stopped after {timeout_s:g} s; --kill ends it without saving")
            return int(Exit.HANG)
        time.sleep(POLL_S)
    log(f"{Path(record.run).name} has stopped")
    return int(Exit.DONE)


def find_launch(name: str, runs_dir: str = "runs") -> LaunchRecord:
    """The record of a launched run, by its folder or its name below runs_dir."""
    for path in (Path(name), Path(runs_dir) / name):
        if (record := LaunchRecord.read(RunDir(path))) is not None:
            return record
    if (run := next((p for p in (Path(name), Path(runs_dir) / name) if (p / "job.yaml").is_file()), None)) is not None:
        raise JobError(
            f"{run} was started by weft train, not by weft launch; Ctrl-C there or SIGTERM saves and stops it, and "
            "weft dash shows it"
        )
    known = sorted(p.parent.parent.name for p in Path(runs_dir).glob("*/launch/record.json"))
    raise JobError(
        f"no launched run is at {name} or {Path(runs_dir) / name}; launched here: {', '.join(known) or 'none'}"
    )
