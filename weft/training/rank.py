"""One rank of a run: `python -m weft.training.rank RUN`, started by the launcher or, through the CLI, by torchrun."""

from __future__ import annotations

import contextlib
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

from weft.guards.out_of_memory import explain as explain_oom
from weft.guards.out_of_memory import is_oom, shrink
from weft.guards.rollback import RollBack
from weft.hardware.cpu_process import keep_freed_memory, threads_for
from weft.job.errors import Exit, HangError, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.failure_report import remove_failure, write_failure
from weft.supervisor.process_name import set_process_name
from weft.training.compile_cache import set_compile_cache
from weft.training.error_text import where_raised
from weft.training.stop_requests import Signals

if TYPE_CHECKING:
    from weft.checkpoint.memory_snapshots import Snapshots
    from weft.training.open_session import Hook
    from weft.training.session import Session

PROCESS_LIMIT = (
    "the limit of processes and threads is reached; raise it with `ulimit -u`, in pids.max of the control group or, "
    "for a container, with --pids-limit"
)
Work = Callable[["Session", Signals], Exit]


def run_rank(
    run: RunDir, job: Job, plan: Plan, signals: Signals, work: Work | None = None, hook: Hook | None = None
) -> int:
    """Train, or run `work` with a session, as the rank given by the environment. Returns the exit code."""
    signals.exit_until_begun()
    set_up_process(run, plan)
    from weft.training.loop import fit_or_explain
    from weft.training.open_session import open_session

    rank, position = int(os.environ.get("RANK", 0)), ""
    set_process_name(f"weft-rank-{rank}")
    held: Snapshots | None = None
    session: Session | None = None
    while True:
        try:
            session = open_session(job, plan, run, snapshots=held, hook=hook)
            position, held = session.mesh.position, session.snapshots
            code = train_with_rollback(session, signals, work or fit_or_explain)
            session.mesh.barrier()
            session.close()
            return int(code)
        except BaseException as error:
            stopped = Signals.decide(signals.flags())
            nothing_done = session is None or session.state.step == session.first_step
            if stopped and nothing_done and is_peer_failure(error):
                return int(stopped)  # another rank got the signal before it had begun
            smaller_plan = record_failure(run, rank, position, error, plan)
            if held is not None:
                held.drop()  # it may reference tensors of the failed session
            if smaller_plan is None or plan.world > 1:  # the other ranks cannot follow
                return exit_code(error)
        plan, session = smaller_plan, None
        remove_failure(run, rank)
        gc.collect()


def set_up_process(run: RunDir, plan: Plan) -> None:
    """Import torch and apply process-wide settings."""
    set_compile_cache(run.compiled)
    import_training()
    import torch

    from weft.precision import choose_cpu_kernels

    if plan.device == "cpu":
        choose_cpu_kernels(plan.precision)
        keep_freed_memory()
        torch.set_num_threads(threads_for(int(os.environ.get("LOCAL_WORLD_SIZE", plan.world))))


def import_training() -> None:
    """Import all that training needs, which takes seconds. Ranks are forked afterwards, so nothing here may start a
    thread or call the CUDA driver."""
    from weft.training.garbage_collection import no_collection

    with no_collection():
        import torch

        import weft.training.loop  # noqa: F401

        torch.compiler.disable(import_training)  # imports dynamo once before the forks: every optimizer needs it


def train_with_rollback(session: Session, signals: Signals, work: Work) -> Exit:
    """Run `work`, and rewind whenever all ranks agree to roll back."""
    while True:
        try:
            return work(session, signals)
        except RollBack as request:
            began, reached = time.perf_counter(), session.state.step
            skipped = session.state.skipped_steps | set(request.skip)
            from weft.training.resume import roll_back

            roll_back(session, request.to_step)
            session.state.skipped_steps |= skipped  # the older state does not contain all of them
            step = session.state.step
            session.event("recovered", fault=request.fault, how="rollback", step=step + 1, steps_lost=reached - step,
                          seconds=time.perf_counter() - began)  # fmt: skip


def exit_code(error: BaseException) -> int:
    if isinstance(error, WeftError):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return int(Exit.INTERRUPTED)
    return int(HangError.exit_code) if is_timeout(error) else int(Exit.DIFFERS)


def is_timeout(error: BaseException) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def record_failure(run: RunDir, rank: int, position: str, error: BaseException, plan: Plan) -> Plan | None:
    """Write the failure record for the launcher and the traceback to this rank's log. If memory ran out, also write and
    return a plan that needs less."""
    with contextlib.suppress(OSError):  # a full disk, or a run folder that was moved away
        run.logs.mkdir(exist_ok=True)
        with (run.logs / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
            log.write("".join(traceback.format_exception(error)))
    cause = {
        "rank": rank,
        "position": position,
        "time": time.time(),
        "kind": type(error).__name__,
        "message": explain_oom(error, plan) if is_oom(error) else str(error).strip(),
        "where": where_raised(error),
        "expected": isinstance(error, WeftError),
        "echo": is_peer_failure(error),
        "machine": is_machine_failure(error),
        "code": exit_code(error),
    }
    if is_process_limit(error):
        cause |= {"message": PROCESS_LIMIT, "expected": True, "machine": False, "code": int(Exit.MACHINE)}
    smaller_plan = shrink(run, plan, error, rank, position) if is_oom(error) else None
    write_failure(run, rank, cause)
    return smaller_plan


def is_process_limit(error: BaseException) -> bool:
    """Whether the system refused another process or thread."""
    text = str(error).lower()
    return "can't start new thread" in text or "resource temporarily unavailable" in text


def is_machine_failure(error: BaseException) -> bool:
    """Whether the machine failed rather than the program, so that a restart may help."""
    text = str(error).lower()
    return isinstance(error, OSError) or is_oom(error) or any(s in text for s in ("cuda error", "nccl"))


def is_device_lost(error: BaseException) -> bool:
    """Whether a kernel of this process failed, such as by an illegal access: its CUDA context can do nothing more."""
    import torch

    return isinstance(error, torch.AcceleratorError)


def is_peer_failure(error: BaseException) -> bool:
    """Whether the error only means that another rank has exited."""
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "connection refused", "broken pipe",
             "remote process exited", "socket closed")  # fmt: skip
    return not isinstance(error, WeftError) and any(s in text for s in signs)


def run_launched_rank(work: Work | None = None, hook: Hook | None = None) -> int:
    """Main function of a rank started by the launcher, with the run's folder as first argument."""
    from weft.supervisor.local_ranks import die_with_parent

    die_with_parent()
    signals = Signals()
    folder = RunDir(Path(sys.argv[1]))
    description = json.loads(folder.plan.read_text(encoding="utf-8"))
    code = run_rank(folder, load_job(str(folder.job)), Plan.from_json(description), signals, work, hook)
    signals.ignore()
    return code


def exit_process(code: int) -> NoReturn:
    """Exit without finalizing Python, during which torch's threads may abort the process."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_process(run_launched_rank())
