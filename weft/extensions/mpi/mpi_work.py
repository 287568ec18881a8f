"""Pending MPI calls: polled by waiters and by a background thread, never waited for inside MPI.

MPI makes progress only while it is called. A thread calls it as long as something is pending, so that a sum started in
the backward pass overlaps with it, and a rank that waits for a file or a socket does not delay its peers. All calls
take one lock: MPI need not support several threads at once."""

from __future__ import annotations

import atexit
import datetime
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.job.errors import MachineError

POLLS_BEFORE_SLEEP = 20
"""Polls before a waiter begins to sleep; small messages usually complete within them."""
MIN_SLEEP_S, MAX_SLEEP_S = 2e-5, 5e-4
BACKGROUND_POLL_S = 1e-3
"""Interval of the background thread."""


Base: Any = dist.Work


class MpiWork(Base):
    """One collective or message."""

    def __init__(
        self, engine: Engine, what: str, requests: Sequence[Any], limit_s: float, held: object,
        after: Callable[[], object] | None, results: list[torch.Tensor],
    ):  # fmt: skip
        super().__init__()
        self.engine, self.what, self.requests, self.limit_s = engine, what, list(requests), limit_s
        self.held, self.after, self.results = held, after, results
        self.done, self.source = False, -1
        self.error: BaseException | None = None
        self.future: Any = None

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        given = timeout.total_seconds()
        self.engine.drive(self, given if given > 0 else self.limit_s)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.engine.poll(self)

    def is_success(self) -> bool:
        return self.done and self.error is None

    def result(self) -> list[torch.Tensor]:
        return self.results

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Completed by a waiter or by the background thread."""
        with self.engine.lock:
            if self.future is None:
                self.future = torch.futures.Future()
                self._complete_future()
            return self.future

    def settle(self, error: BaseException | None = None) -> None:
        """Called once, with the lock, when all requests have ended."""
        try:
            if error is None and self.after is not None:
                self.after()
        except BaseException as failed:
            error = failed
        self.error, self.done = error, True
        self.held = self.after = None
        self._complete_future()

    def _complete_future(self) -> None:
        if self.future is None or not self.done or self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.results)


class CombinedWork(Base):
    """Several works as one."""

    def __init__(self, works: list[MpiWork]):
        super().__init__()
        self.works = works

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        return all([work.wait(timeout) for work in self.works])

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self.works])

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self.works])


class Engine:
    """Runs the pending works of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.something = threading.Condition(self.lock)
        self.under_way: list[MpiWork] = []
        self.thread: threading.Thread | None = None
        self.groups = 0
        """Communicators that are open."""
        self.ending = False

    def start(
        self, what: str, begin: Callable[[], Sequence[Any]], limit_s: float, held: object = None,
        after: Callable[[], object] | None = None, results: list[torch.Tensor] | None = None,
    ) -> MpiWork:  # fmt: skip
        """Start some requests; `held` is kept until they end, then `after` is called."""
        with self.lock:
            work = MpiWork(self, what, begin(), limit_s, held, after, results or [])
            if not self.poll(work):
                self.under_way.append(work)
                if self.thread is None:
                    self.thread = threading.Thread(target=self._poll_in_background, name="weft-mpi", daemon=True)
                    self.thread.start()
                self.something.notify()
            return work

    def poll(self, work: MpiWork) -> bool:
        """Whether a work has ended; completes it if so."""
        with self.lock:
            if work.done:
                return True
            try:
                statuses = [mpi().Status() for _ in work.requests]
                if not mpi().Request.Testall(work.requests, statuses):
                    return False
                if statuses:
                    work.source = statuses[-1].Get_source()
                work.settle()
            except Exception as error:
                work.settle(RuntimeError(f"MPI {work.what} failed: {error}"))
            return True

    def drive(self, work: MpiWork, limit_s: float) -> None:
        """Poll until a work has ended."""
        deadline, polls, sleep_s = time.monotonic() + limit_s, 0, MIN_SLEEP_S
        while not self.poll(work):
            polls += 1
            if polls > POLLS_BEFORE_SLEEP:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"MPI {work.what} timed out after {limit_s:.0f} s: not every rank has joined it")
                time.sleep(sleep_s)
                sleep_s = min(MAX_SLEEP_S, sleep_s * 1.5)

    def _poll_in_background(self) -> None:
        while True:
            with self.something:
                self.under_way = [work for work in self.under_way if not self.poll(work)]
                while not self.under_way and not self.ending:
                    self.something.wait()
                if self.ending:
                    return
                self.something.wait(BACKGROUND_POLL_S)

    def stop(self) -> None:
        """End the thread; nothing may be pending."""
        with self.something:
            self.ending = True
            self.something.notify_all()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.ending = False


@functools.cache
def mpi() -> Any:
    """mpi4py's MPI, initialised; leave() finalises it if every group was closed."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.finalize = False  # a rank that fails must not wait in MPI_Finalize for those that wait for it
        from mpi4py import MPI
    except ImportError as error:
        raise MachineError(f"MPI needs mpi4py ({error}): pip install 'weft[mpi]'") from None
    except RuntimeError as error:  # the wheel is there and finds no library
        why = str(error).strip().splitlines()[-1]
        raise MachineError(f"mpi4py finds no MPI library ({why}): apt-get install openmpi-bin libopenmpi-dev") from None
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise MachineError("this MPI allows calls from one thread alone; one with MPI_THREAD_SERIALIZED would work")
    return MPI


@functools.cache
def engine() -> Engine:
    """The engine of this process."""
    found = Engine()
    atexit.register(leave)
    return found


def leave() -> None:
    """Finalise MPI if this process closed all groups; else mpirun sees a failure and ends the other ranks."""
    if "mpi4py.MPI" not in sys.modules:
        return
    MPI = sys.modules["mpi4py.MPI"]
    if MPI.Is_initialized() and not MPI.Is_finalized() and not engine().groups:
        engine().stop()
        MPI.Finalize()
