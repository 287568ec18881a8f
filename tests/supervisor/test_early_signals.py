"""Signals before the ranks have started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz.signals import is_handled, send_one
from helpers.command import DEADLINE_S, Started, run_of, step_of, until, write_job
from helpers.forked_python import TEMPLATE_ENV, Popen

from weft.supervisor.run_lock import run_lock
from weft.supervisor.stop_signals import KILL_AFTER_INTERRUPTS, SignalForwarder


def test_sigterm_before_ranks_start_exits_with_preempted(tmp_path: Path) -> None:
    write_job(tmp_path, train={"steps": 3, "global_batch": 4})
    run = run_of(tmp_path, "early")
    with run_lock(run):  # so that it cannot get any further
        started = Started(tmp_path, "train", "job.yaml", "name=early", "--nproc", "2")
        until(lambda: is_handled(started.process.pid, signal.SIGTERM))
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(DEADLINE_S) == 75
    assert not run.metrics.exists()


@pytest.mark.parametrize(
    ("ranks", "number", "after_s", "popen"),
    [
        (2, signal.SIGTERM, 0.4, subprocess.Popen),
        (2, signal.SIGINT, 1.3, subprocess.Popen),
        (2, signal.SIGUSR1, 0.2, Popen),
        (2, signal.SIGHUP, 0.5, Popen),
        (1, signal.SIGQUIT, 0.9, Popen),
    ],
)
def test_signal_at_any_moment_ends_the_run(
    tmp_path: Path, ranks: int, number: signal.Signals, after_s: float, popen: type[subprocess.Popen[Any]]
) -> None:
    """With a new interpreter, which imports for seconds, and a fork, which starts at once. tests/fuzz/signals.py sends
    many more."""
    assert send_one(tmp_path, ranks, number, after_s, popen, TEMPLATE_ENV, total=10**9) == ""


@pytest.fixture
def own_interrupt_handler() -> Iterator[None]:
    """Restores the handler of Ctrl-C, which is ignored after ranks were killed."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_interrupt_handler")
def test_ranks_that_start_later_get_earlier_signals() -> None:
    class Rank:
        def __init__(self) -> None:
            self.got: list[int] = []

        def send_signal(self, number: int, /) -> None:
            self.got.append(number)

    with SignalForwarder() as signals:
        early, late = Rank(), Rank()
        signals.add(early)
        signals.unblock()
        os.kill(os.getpid(), signal.SIGUSR1)
        signals.add(late)
        assert early.got == late.got == [signal.SIGUSR1]
        for _ in range(KILL_AFTER_INTERRUPTS):
            os.kill(os.getpid(), signal.SIGINT)
        assert late.got[-1] == signal.SIGKILL


SLOW_DATASET = """
import pathlib, time

def samples(data):
    pathlib.Path("opened").touch()
    time.sleep(10**6)
"""


@pytest.mark.parametrize("arguments", [["--nproc", "2"], ["--nproc", "1", "--no-resilient"]])
def test_signal_ends_a_start_that_waits(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "slow_samples.py").write_text(SLOW_DATASET, encoding="utf-8")
    data = {"source": "slow_samples:samples"}
    write_job(tmp_path, train={"steps": 3, "global_batch": 4}, data=data)
    started = Started(tmp_path, "train", "job.yaml", "name=waits", *arguments)
    started.wait_for((tmp_path / "opened").exists)
    started.process.send_signal(signal.SIGTERM)
    result = started.end()
    assert result.code == 75
    assert "stopped at step 0 before another was done; the same command continues from here" in result.err
    assert step_of(run_of(tmp_path, "waits")) == 0
