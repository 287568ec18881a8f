"""A rank of a supervised run: `python -m weft.training.supervised_rank RUN`.

It imports everything, waits until an attempt includes its slot, and trains as the given rank. When another rank is lost
it returns here with everything loaded and waits for the next attempt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from weft.job import parse_job
from weft.job.errors import Exit, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.attempt import NOT_CONNECTED, Attempt, read_attempt, started_job, started_plan
from weft.supervisor.failure_report import write_failure
from weft.supervisor.fork_server import NoFirstFork, await_run, serve
from weft.supervisor.hang_cause import STACK_SIGNAL
from weft.supervisor.heartbeat import BoardHeartbeat, Fenced
from weft.supervisor.local_ranks import die_with_parent
from weft.supervisor.memory_folder import write_file
from weft.supervisor.process_name import set_process_name
from weft.supervisor.status_board import StatusBoard
from weft.training.compile_cache import set_compile_cache
from weft.training.rank import (
    PROCESS_LIMIT,
    exit_code,
    exit_process,
    import_training,
    is_device_lost,
    is_peer_failure,
    is_timeout,
    record_failure,
    set_up_process,
    train_with_rollback,
)
from weft.training.stop_requests import Signals
from weft.wire.secret import run_secret

if TYPE_CHECKING:
    import torch.distributed as dist

    from weft.data.dataset import Dataset
    from weft.training.open_session import Hook
    from weft.training.session import Session
    from weft.wire.tunnel import Tunnel

POLL_S = 0.01
SPARE_POLL_S = 5.0
"""Poll interval of a spare without wake-ups."""
ATTEMPT_OVER_WAIT_S = 0.5
"""How long an error caused by a lost peer may precede the end of the attempt."""


class SupervisedRank:
    """A rank or spare in its slot."""

    def __init__(self, run: RunDir, folder: Path, slot: int, signals: Signals, hook: Hook | None = None):
        self.run, self.folder, self.slot, self.signals, self.hook = run, folder, slot, signals, hook
        self.board = StatusBoard(folder / "board")
        self.heartbeat = BoardHeartbeat(self.board, slot)
        self.dataset: Dataset | None = None
        self.compiles = False

    def work(self) -> int:
        """Join attempts until one ends the run. Returns the exit code."""
        given, plan = started_job(self.folder), started_plan(self.folder)
        set_up_process(self.run, plan)
        self.compiles = plan.compile
        with contextlib.suppress(Exception):  # opened again in an attempt, where errors are reported
            from weft.data.open_dataset import open_dataset

            self.dataset = open_dataset(given)
        from weft.comm.teardown import freeze_imports, freeze_more, leave
        from weft.mesh import open_device

        freeze_imports()
        open_device(plan)
        number, phase = 0, "spare"
        while True:
            self.heartbeat.now(phase, 0)
            attempt = self._wait_for_attempt(number)
            number, phase = attempt.number, "waiting"
            if (job := parse_job(attempt.job)) != given:
                given, self.dataset = job, None
            code = self._join_attempt(attempt, job, Plan.from_json(attempt.plan))
            if code is not None:
                return code
            leave()  # the error and the tensors it referenced are gone
            freeze_more()

    def _wait_for_attempt(self, after: int) -> Attempt:
        """Wait for a valid attempt that includes this slot; the process may have started before it is published."""
        from weft.models.kernel_internals import import_compiler

        seen = after
        while True:
            if (number := self.board["published"]) > seen and self.board.valid(number):
                seen = number
                attempt = read_attempt(self.folder, number)
                if attempt.rank_of(self.slot) is not None:
                    return attempt
                if self.compiles:  # a spare has the time; a rank imports it when the model is built
                    import_compiler()
            self.heartbeat.wait_for_news(SPARE_POLL_S)

    def _join_attempt(self, attempt: Attempt, job: Job, plan: Plan) -> int | None:
        """Train as a rank of an attempt. Returns the exit code, or None if another rank was lost and this process can
        join the next attempt."""
        from weft.mesh import connect
        from weft.supervisor.collective_counters import CollectiveCounters
        from weft.supervisor.mesh_sockets import MeshSockets
        from weft.supervisor.process_group_internals import NCCL_ENVIRONMENT
        from weft.training.loop import fit_or_explain
        from weft.training.open_session import open_session
        from weft.wire.tunnel import open_tunnel

        rank, position, sockets = attempt.rank_of(self.slot) or 0, "", MeshSockets()
        tunnel: Tunnel | None = None
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(list(attempt.ranks).index(rank)), "WORLD_SIZE": str(attempt.world),
            "LOCAL_WORLD_SIZE": str(len(attempt.ranks)),
        }  # fmt: skip
        os.environ.update(environment | attempt.environment)
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.heartbeat.on_fence = sockets.shut_down
        self.heartbeat.join(attempt.number, rank)
        self.signals.asked = lambda: self.board["asked"] == attempt.number
        set_process_name(f"weft-rank-{rank}")
        self._log(rank, f"attempt {attempt.number} begins, in slot {self.slot}, process {os.getpid()}")
        try:
            with sockets.opening():
                store, tunnel = self._store(attempt, job), open_tunnel(job, self.run)
                mesh = connect(plan, job.comm.timeout_s, store, tunnel)
            position = mesh.position
            self._log(rank, "connected to the other ranks")
            self.heartbeat.watch = watch = CollectiveCounters(mesh)
            place = {"position": position, "groups": watch.members}
            write_file(self.folder / f"place-{rank}.json", json.dumps(place))
            session = open_session(
                job, plan, self.run, heartbeat=self.heartbeat, mesh=mesh, dataset=self.dataset, hook=self.hook,
                began=attempt.began if attempt.number == 1 else None,
            )  # fmt: skip
            session.snapshots.wanted = lambda: (self.board["safe"], self.board["target"])
            self._restore_run_totals(session, attempt)
            self._log(rank, f"ready to train after step {session.state.step}")
            code = train_with_rollback(session, self.signals, fit_or_explain)
            session.now("end")
            mesh.barrier()
            session.close()
            if code == Exit.PREEMPTED and self.board["pause"] == attempt.number and not self.signals.received:
                return None  # only the supervisor asked, so that nodes can join
            return int(code)
        except BaseException as error:
            if not self._is_attempt_over(error):
                record_failure(self.run, rank, position, error, plan)
                return exit_code(error)
            self._log(rank, f"attempt {attempt.number} is over: {type(error).__name__}: {error}")
            if not position:  # it was interrupted while it connected
                self.heartbeat.leave_unconnected()
                return NOT_CONNECTED
        finally:
            self.heartbeat.watch = lambda: (0, 0, [])
            sockets.shut_down()
            if tunnel is not None:
                tunnel.close()
        return None

    def _log(self, rank: int, text: str) -> None:
        with contextlib.suppress(OSError), (self.run.logs / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
            log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S.%f} {text}\n")

    def _store(self, attempt: Attempt, job: Job) -> dist.Store:
        """The rendezvous store: a file on one machine, the leader's store server on several nodes."""
        if not (at := attempt.environment.get("WEFT_STORE_AT")):
            from weft.supervisor.attempt_file_store import AttemptFileStore

            return AttemptFileStore(attempt.store, attempt.world, job.comm.timeout_s, self.heartbeat.fence)
        from weft.supervisor.authenticated_store import AuthenticatedStore

        host, port = at.rsplit(":", 1)
        return AuthenticatedStore(
            (host, int(port)), run_secret(self.run.path), attempt.number, job.comm.timeout_s, self.heartbeat.fence,
            job.comm.encrypt,
        )  # fmt: skip

    def _restore_run_totals(self, session: Session, attempt: Attempt) -> None:
        """Restore totals of the run from earlier attempts."""
        self.heartbeat.resumed(session.state.step)
        # a node that joined later has another one, and ranks that differ would not save together
        starts = session.mesh.all_gather_json(self.board["first_step"] or session.first_step + 1)
        self.board["first_step"] = min(cast(list[int], starts))
        session.first_step = self.board["first_step"] - 1
        session.began = attempt.began
        if attempt.number > 1:
            from weft.training.resume import save_if_due

            save_if_due(session)

    def _is_attempt_over(self, error: BaseException) -> bool:
        """Whether an error only means that another rank is lost, so that this rank joins the next attempt."""
        if isinstance(error, WeftError | KeyboardInterrupt) or is_device_lost(error):
            return False
        if isinstance(error, Fenced) or is_peer_failure(error) or is_timeout(error):
            return True
        deadline = time.monotonic() + ATTEMPT_OVER_WAIT_S
        while time.monotonic() < deadline:
            if not self.board.valid(self.heartbeat.attempt):
                return True
            time.sleep(POLL_S)
        return False


def explain_import(run: RunDir, error: BaseException) -> NoReturn:
    """End the fork server, which cannot import torch."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    end_fork_server(run, f"the ranks cannot import torch ({what}); `ulimit -a` shows the limits of this shell")


def end_fork_server(run: RunDir, why: str) -> NoReturn:
    """End the fork server, by which no rank could be forked, with a failure record; nothing else may need memory."""
    cause = {
        "rank": 0, "position": "", "time": time.time(), "kind": "MachineError", "message": why, "where": "",
        "expected": True, "echo": False, "machine": False, "code": int(Exit.MACHINE),
    }  # fmt: skip
    write_failure(run, 0, cause)
    os._exit(Exit.MACHINE)


def is_supervised() -> bool:
    """Whether this process is a fork server, rank or spare of a supervised run, not a rank that is launched once."""
    return "WEFT_MEMORY" in os.environ or "WEFT_FORK_SERVER" in os.environ


def main(hook: Hook | None = None) -> int:
    die_with_parent()
    if "WEFT_FORK_SERVER" not in os.environ:
        run = RunDir(Path(sys.argv[1]))
    else:
        set_process_name("weft-forkserver")
        failure: BaseException | None = None
        try:
            set_compile_cache(None)  # the run is not known yet
            import_training()
        except (ImportError, MemoryError, OSError) as error:
            failure = error
        if (path := await_run()) is None:
            return 0
        run = RunDir(path)
        if failure is not None:
            explain_import(run, failure)
        set_compile_cache(run.compiled)
        from weft.comm.teardown import freeze_imports
        from weft.models.kernel_internals import hash_triton

        if started_plan(Path(os.environ["WEFT_MEMORY"])).device == "cuda":
            hash_triton()
        freeze_imports()
        try:
            forked = serve()
        except NoFirstFork:
            end_fork_server(run, PROCESS_LIMIT)
        if not forked:
            return 0
        die_with_parent()
    signals, folder = Signals(), Path(os.environ["WEFT_MEMORY"])
    set_process_name("weft-spare")
    stacks = (folder / f"stack-{os.getpid()}").open("w")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    code = SupervisedRank(run, folder, int(os.environ["WEFT_SLOT"]), signals, hook).work()
    signals.ignore()
    return code


if __name__ == "__main__":
    exit_process(main())
