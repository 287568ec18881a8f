"""One rank of a run: `python -m weft.training.rank RUN`, started by the launcher or, through the CLI, by torchrun."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from weft.guards.out_of_memory import explain as ran_out
from weft.guards.out_of_memory import is_oom, shrink
from weft.guards.rollback import RollBack
from weft.hardware.probe import probe
from weft.job.errors import Exit, HangError, WeftError
from weft.job.load import load_job
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.training.signals import Signals

if TYPE_CHECKING:
    from weft.checkpoint.memory_snapshots import Snapshots
    from weft.training.session import Hook, Session

Work = Callable[["Session", Signals], Exit]


def run_rank(
    run: RunDir, job: Job, plan: Plan, signals: Signals, work: Work | None = None, hook: Hook | None = None
) -> int:
    """Train, or do other work with a session, as the rank that the environment names. Returns the exit code."""
    set_up(run, plan)
    from weft.training.loop import fit_or_explain
    from weft.training.session import open_session

    rank, position = int(os.environ.get("RANK", 0)), ""
    held: Snapshots | None = None
    while True:
        try:
            session = open_session(job, plan, run, snapshots=held, hook=hook)
            position, held = session.mesh.position, session.snapshots
            code = attempt(session, signals, work or fit_or_explain)
            session.mesh.barrier()
            session.close()
            return int(code)
        except BaseException as error:
            less = explain(run, rank, position, error, plan)
            if held is not None:
                held.drop()  # it may hold on to tensors of the session that ended
            if less is None or plan.world > 1:  # others wait for this rank, and do not know
                return exit_code(error)
        plan, session = less, None  # type: ignore[assignment]
        (run.logs / f"failure-{rank}.json").unlink()
        gc.collect()


def set_up(run: RunDir, plan: Plan) -> None:
    """Import torch, and set what belongs to the whole process."""
    bring_in(run)
    import torch

    if plan.device == "cpu":
        keep_freed_memory()
        torch.set_num_threads(threads_for(int(os.environ.get("LOCAL_WORLD_SIZE", plan.world))))


def bring_in(run: RunDir) -> None:
    """Import all that training needs: seconds, in which a signal may already come."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(run.compiled.absolute()))  # read when torch is imported

    from weft.training.garbage_collection import no_collection

    with no_collection():
        import weft.training.loop  # noqa: F401


def attempt(session: Session, signals: Signals, work: Work) -> Exit:
    """Do the work, and go back whenever all ranks agree that something went wrong which other samples would mend."""
    while True:
        try:
            return work(session, signals)
        except RollBack as wish:
            began, reached = time.perf_counter(), session.state.step
            skipped = session.state.skipped_steps | set(wish.skip)
            session.roll_back(wish.to_step)
            session.state.skipped_steps |= skipped  # an older state does not know of all of them
            step = session.state.step
            session.event("recovered", fault=wish.fault, how="rollback", step=step + 1, steps_lost=reached - step,
                          seconds=time.perf_counter() - began)  # fmt: skip


def keep_freed_memory() -> None:
    """Let glibc keep what one step frees for the next: to give it back and take it again costs page faults."""
    trim, pad, map_from = -1, -2, -3  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        for option, size in ((trim, 1 << 30), (pad, 1 << 26), (map_from, 1 << 25)):
            libc.mallopt(option, size)


def threads_for(ranks: int) -> int:
    """Threads of one CPU rank: the cores, shared evenly."""
    return max(1, probe().cores_physical // max(1, ranks))


def exit_code(error: BaseException) -> int:
    if isinstance(error, WeftError):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return int(Exit.INTERRUPTED)
    return int(HangError.exit_code) if is_timeout(error) else int(Exit.DIFFERS)


def is_timeout(error: BaseException) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def explain(run: RunDir, rank: int, position: str, error: BaseException, plan: Plan) -> Plan | None:
    """Leave the cause where the launcher finds it, and the traceback in this rank's log. Where memory ran out, returns
    the plan with which it would not, and leaves that too."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f"{os.sep}weft{os.sep}" in f.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}" if ours else ""
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
        log.write("".join(traceback.format_exception(error)))
    cause = {
        "rank": rank,
        "position": position,
        "time": time.time(),
        "kind": type(error).__name__,
        "message": ran_out(error, plan) if is_oom(error) else str(error).strip(),
        "where": where,
        "expected": isinstance(error, WeftError),
        "echo": is_echo(error),
        "machine": is_machine(error),
        "code": exit_code(error),
    }
    less = shrink(run, plan, error, rank, position) if is_oom(error) else None
    (run.logs / f"failure-{rank}.json").write_text(json.dumps(cause), encoding="utf-8")
    return less


def is_machine(error: BaseException) -> bool:
    """Whether another process or another try may do better: the machine failed, not the program."""
    text = str(error).lower()
    return isinstance(error, OSError) or is_oom(error) or any(s in text for s in ("cuda error", "nccl"))


def is_echo(error: BaseException) -> bool:
    """Whether the error only says that another rank went away."""
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "connection refused", "broken pipe",
             "remote process exited", "socket closed")  # fmt: skip
    return not isinstance(error, WeftError) and any(s in text for s in signs)


def run_here(work: Work | None = None, hook: Hook | None = None) -> int:
    """A rank that the launcher started: the run's folder is the first argument."""
    from weft.supervisor.local_ranks import die_with_parent

    die_with_parent()
    listening = Signals()
    folder = RunDir(Path(sys.argv[1]))
    description = json.loads(folder.plan.read_text(encoding="utf-8"))
    code = run_rank(folder, load_job(str(folder.job)), Plan.from_json(description), listening, work, hook)
    listening.ignore()
    return code


def end(code: int) -> NoReturn:
    """All is written: torch's threads may abort a process whose Python is being taken down."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(run_here())
