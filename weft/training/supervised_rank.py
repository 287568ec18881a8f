"""A rank of a supervised run: `python -m weft.training.supervised_rank RUN`. It joins one attempt after another.

It imports everything, waits on the board until an attempt names its slot, and trains as the rank it is given. When
another rank is lost it comes back here, with all it has loaded, and waits for the next attempt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from weft.job.errors import Exit, WeftError
from weft.job.load import load_job
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.attempt import Attempt, read_attempt
from weft.supervisor.diagnosis import STACK
from weft.supervisor.fork_server import serve
from weft.supervisor.heartbeat import Fenced, Heart
from weft.supervisor.local_ranks import die_with_parent
from weft.supervisor.status_board import Board
from weft.training.rank import attempt as train
from weft.training.rank import bring_in, end, exit_code, explain, is_echo, is_timeout, set_up
from weft.training.signals import Signals
from weft.wire.secret import run_secret

if TYPE_CHECKING:
    import torch.distributed as dist

    from weft.data.dataset import Dataset
    from weft.training.session import Hook, Session

LOOK_S = 0.01
NEWS_S = 5.0
"""A spare looks at the board so often even if nobody rings."""
FENCE_S = 0.5
"""How long before the word that the attempt is over an error may come that only says that another rank went away."""


class Member:
    """A process in its slot."""

    def __init__(self, run: RunDir, folder: Path, slot: int, signals: Signals, hook: Hook | None = None):
        self.run, self.folder, self.slot, self.signals, self.hook = run, folder, slot, signals, hook
        self.board = Board(folder / "board")
        self.heart = Heart(self.board, slot)
        self.dataset: Dataset | None = None

    def work(self) -> int:
        """Attempt after attempt, until one ends the run. Returns the exit code."""
        job, plan = load_job(str(self.run.job)), self._plan()
        set_up(self.run, plan)
        with contextlib.suppress(Exception):  # it is opened again, and its mistakes told, where there is a rank
            from weft.data.dataset import open_dataset

            self.dataset = open_dataset(job)
        from weft.comm.teardown import leave, set_aside, settle

        settle()
        number, phase = 0, "spare"
        while True:
            self.heart.now(phase, 0)
            attempt = self._next(number)
            number, phase = attempt.number, "waiting"
            code = self._take_part(attempt, job, Plan.from_json(attempt.plan))
            if code is not None:
                return code
            leave()  # the error that broke it has gone, and with it all that it held
            set_aside()

    def _plan(self) -> Plan:
        return Plan.from_json(json.loads(self.run.plan.read_text(encoding="utf-8")))

    def _next(self, after: int) -> Attempt:
        """Wait for an attempt that names this slot and is not over: a process may be born before the next is published,
        into the place of the one that died."""
        seen = after
        while True:
            if (number := self.board["published"]) > seen and self.board.valid(number):
                seen = number
                attempt = read_attempt(self.folder, number)
                if attempt.rank_of(self.slot) is not None:
                    return attempt
            self.heart.wait_for_news(NEWS_S)

    def _take_part(self, attempt: Attempt, job: Job, plan: Plan) -> int | None:
        """Train as a rank of an attempt. Returns the exit code, or None when the attempt was broken by another rank."""
        from weft.mesh import connect
        from weft.supervisor.connections import Watch, Wires
        from weft.training.loop import fit_or_explain
        from weft.training.session import open_session

        rank, position, wires = attempt.rank_of(self.slot) or 0, "", Wires()
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(list(attempt.ranks).index(rank)), "WORLD_SIZE": str(attempt.world),
            "LOCAL_WORLD_SIZE": str(len(attempt.ranks)),
        }  # fmt: skip
        os.environ.update(environment | attempt.environment)
        self.heart.on_fence = wires.cut
        self.heart.join(attempt.number, rank)
        self._note(rank, f"attempt {attempt.number} begins, in slot {self.slot}, process {os.getpid()}")
        try:
            with wires.opening():
                store = self._store(attempt, job.comm.timeout_s)
                mesh = connect(plan, job.comm.timeout_s, store)
            position = mesh.position
            self.heart.watch = watch = Watch(mesh)
            place = {"position": position, "groups": watch.members}
            (self.folder / f"place-{rank}.json").write_text(json.dumps(place), encoding="utf-8")
            session = open_session(
                job, plan, self.run, pulse=self.heart, mesh=mesh, dataset=self.dataset, hook=self.hook
            )
            session.snapshots.wanted = lambda: (self.board["safe"], self.board["target"])
            self._carry_on(session, attempt)
            code = train(session, self.signals, fit_or_explain)
            session.now("end")
            mesh.barrier()
            session.close()
            if code == Exit.PREEMPTED and self.board["pause"] == attempt.number and self._only_paused():
                return None
            return int(code)
        except BaseException as error:
            if not self._is_over(error):
                explain(self.run, rank, position, error, plan)
                return exit_code(error)
            self._note(rank, f"attempt {attempt.number} is over: {type(error).__name__}: {error}")
        finally:
            self.heart.watch = lambda: (0, 0, [])
            wires.cut()
        return None

    def _note(self, rank: int, text: str) -> None:
        with contextlib.suppress(OSError), (self.run.logs / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
            log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S.%f} {text}\n")

    def _store(self, attempt: Attempt, timeout_s: float) -> dist.Store:
        """Where the ranks of an attempt meet: in a file of this machine, or at a supervisor where there are several."""
        if not (at := attempt.environment.get("WEFT_STORE_AT")):
            from weft.supervisor.file_store import FencedStore

            return FencedStore(attempt.store, attempt.world, timeout_s, self.heart.fence)
        from weft.supervisor.authenticated_store import SecretStore

        host, port = at.rsplit(":", 1)
        return SecretStore((host, int(port)), run_secret(self.run.path), attempt.number, timeout_s, self.heart.fence)

    def _only_paused(self) -> bool:
        """Whether nobody but the supervisors asked this rank to stop: then it has saved, and will go on."""
        received = set(self.signals.received)
        self.signals.received -= {signal.SIGUSR1}
        return received <= {signal.SIGUSR1}

    def _carry_on(self, session: Session, attempt: Attempt) -> None:
        """What a later attempt knows of the first one."""
        if not self.board["first_step"]:
            self.board["first_step"] = session.first_step + 1
        session.first_step = self.board["first_step"] - 1
        session.began = attempt.began
        if attempt.number > 1:
            session.save_if_due()

    def _is_over(self, error: BaseException) -> bool:
        """Whether an error only says that another rank is lost, and this one should come back for the next attempt."""
        if isinstance(error, WeftError | KeyboardInterrupt):
            return False
        if isinstance(error, Fenced) or is_echo(error) or is_timeout(error):
            return True
        deadline = time.monotonic() + FENCE_S
        while time.monotonic() < deadline:
            if not self.board.valid(self.heart.attempt):
                return True
            time.sleep(LOOK_S)
        return False


def main(hook: Hook | None = None) -> int:
    die_with_parent()
    run = RunDir(Path(sys.argv[1]))
    if "WEFT_NURSERY" in os.environ:
        bring_in(run)
        from weft.comm.teardown import settle

        settle()
        if not serve():
            return 0
        die_with_parent()
    signals = Signals()
    folder = Path(os.environ["WEFT_MEMORY"])
    stacks = (folder / f"stack-{os.getpid()}").open("w")
    faulthandler.register(STACK, file=stacks, all_threads=True)
    code = Member(run, folder, int(os.environ["WEFT_SLOT"]), signals, hook).work()
    signals.ignore()
    return code


if __name__ == "__main__":
    end(main())
