"""A process beside a run, `python -m weft.watch.follower`, that feeds trackers, Prometheus and alerts from its files.

Training only writes metrics.jsonl and events.jsonl, as always. What is slow, fails or hangs here does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir
from weft.job.import_by_name import find_object
from weft.job.load import load_job
from weft.job.schema import Job
from weft.job.watch import TRACKERS
from weft.watch.journal import Journal
from weft.watch.run_tail import LineTail
from weft.watch.sinks import SINKS, Sink

POLL_S = 1.0
HANG_S = 60.0
"""A call that takes longer is reported once."""
FINISH_S = 20.0
"""How long all sinks together may take after the run has ended."""
QUIET_S = 2.0
"""A wait for the sinks that takes longer is announced."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class SinkThread(threading.Thread):
    """Feeds one sink from the run's files at its own pace; an error ends only this thread."""

    def __init__(self, run: RunDir, sink: Sink, report: Callable[[str, str], None]) -> None:
        super().__init__(name=f"weft-{sink.name}", daemon=True)
        self.sink, self.report = sink, report
        self.metrics, self.events = LineTail(run.metrics), LineTail(run.events)
        self.ending = threading.Event()
        self.busy_since: float | None = None
        self.ended = False

    def run(self) -> None:
        try:
            self._call(self.sink.start)
            more = False
            while True:
                last = self.ending.is_set()  # read before the files, so that what was written before is read
                records, events = self.metrics.read(), self.events.read()
                more = bool(records or events)
                self.ended = ends(events, self.ended)
                self._call(self.sink.feed, records, events)
                if last and not more:
                    break
                if not more:
                    self.ending.wait(POLL_S)
            self._call(self.sink.finish, self.ended)
        except BaseException as error:  # also SystemExit of a library
            self.report(self.sink.name, f"{type(error).__name__}: {error}")

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        self.busy_since = time.monotonic()
        function(*args)
        self.busy_since = None


def ends(events: list[dict[str, Any]], before: bool) -> bool:
    """Whether the run has ended after these events."""
    for event in events:
        kind = event.get("event")
        if kind in ("done", "stop", "failed", "diverged"):
            before = True
        elif kind in ("start", "resume"):
            before = False
    return before


def sinks_of(run: RunDir, job: Job, journal: Journal, since: float) -> list[Sink]:
    """The sinks that a job asks for; this start of the run began at `since`."""
    sinks: list[Sink] = []
    for kind in SINKS:
        if kind.wanted(job):
            sinks += find_object(kind.build, "watch")(run, job, journal, since)
    return sinks


def wanted(job: Job) -> bool:
    """Whether a job needs this process."""
    return any(kind.wanted(job) for kind in SINKS)


def check_trackers(job: Job) -> None:
    """Refuse a job whose trackers are not installed."""
    for name in job.watch.trackers:
        package = TRACKERS[name].package
        if find_spec(package) is None:
            raise MachineError(
                f"watch.trackers={name} needs the package {package}: pip install 'weft[{name}]', or leave {name} out"
            )


def follow(run: RunDir, ending: Callable[[float], bool], since: float = 0.0) -> None:
    """Feed all sinks until `ending`, called with seconds to wait, is true; then give them FINISH_S to finish."""
    with Journal(run) as journal:
        reported: set[str] = set()

        def report(name: str, why: str) -> None:
            if name not in reported:
                reported.add(name)
                journal.event("watch_failed", what=name, why=f"{why[:500]}; training is not affected")

        threads = [SinkThread(run, sink, report) for sink in sinks_of(run, load_job(str(run.job)), journal, since)]
        for thread in threads:
            thread.start()
        while not ending(POLL_S):
            for thread in threads:
                busy_since = thread.busy_since
                if busy_since is not None and time.monotonic() - busy_since > HANG_S:
                    report(thread.sink.name, f"no answer for {HANG_S:.0f} s")
        deadline = time.monotonic() + FINISH_S
        for thread in threads:
            thread.ending.set()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                report(thread.sink.name, f"did not finish within {FINISH_S:.0f} s after the run")


@contextlib.contextmanager
def following(run: RunDir, job: Job, log: Callable[[str], None]) -> Iterator[None]:
    """Run the process beside what happens inside, if the job needs it. It ends when this process does."""
    if not wanted(job):
        yield
        return
    process = _start(run, log)
    try:
        yield
    finally:
        if process is not None:
            _finish(process, log)


def _start(run: RunDir, log: Callable[[str], None]) -> subprocess.Popen[bytes] | None:
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
        with (run.logs / "watch.log").open("ab") as output:
            # a session of its own, so that Ctrl-C does not end it before the run
            return subprocess.Popen(
                [sys.executable, "-m", "weft.watch.follower", str(run.path), f"{time.time():.3f}"],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        log(f"trackers, Prometheus and alerts do not run ({error}); training continues without them")
        return None


def _finish(process: subprocess.Popen[bytes], log: Callable[[str], None]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(QUIET_S)
    except subprocess.TimeoutExpired:
        log("waiting for trackers and alerts to finish")
        try:
            process.wait(FINISH_S + 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Follow the run of the first argument, started at the time of the second, until stdin is closed: by its launcher,
    or because that is gone."""
    closed = threading.Event()

    def wait_for_end() -> None:
        while sys.stdin.buffer.read(1):
            pass
        closed.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        follow(RunDir(Path(sys.argv[1])), closed.wait, float(sys.argv[2]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a thread that hangs cannot keep the process


if __name__ == "__main__":
    main()
