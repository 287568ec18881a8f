"""Signals before the ranks have started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz.signals import JOB, is_handled, send_one
from helpers.command import DEADLINE_S, Started, run_of, step_of, until, write_job
from helpers.forked_python import TEMPLATE_ENV, Popen

from weft.checkpoint.format import newest_good
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


STALLING_DATASET = """
import pathlib, time
import numpy as np

class Dataset:
    train_len, val_len = 10**6, 4

    def val(self, index):
        tokens = np.arange(index, index + 17) % 256
        return {"inputs": tokens[:-1], "targets": tokens[1:], "valid": np.ones(16, bool)}

    def train(self, index):
        if index >= 24:
            pathlib.Path("stalled").touch()
            time.sleep(10**6)
        return self.val(index)

def samples(data):
    return Dataset()
"""


def test_signal_ends_a_run_that_waits_for_data(tmp_path: Path) -> None:
    """Its ranks are replaced, and the new ones save the snapshots."""
    (tmp_path / "stalling_samples.py").write_text(STALLING_DATASET, encoding="utf-8")
    data = {"source": "stalling_samples:samples", "seq_len": 16, "shuffle": "none"}
    write_job(tmp_path, **{**JOB, "data": data, "train": {"steps": 100, "global_batch": 4, "eval_every": 0}})
    run = run_of(tmp_path, "stalls")
    started = Started(tmp_path, "train", "job.yaml", "name=stalls", "--nproc", "2")
    started.wait_for(lambda: (tmp_path / "stalled").exists() and step_of(run) == 5)  # the sixth is still pending
    started.process.send_signal(signal.SIGINT)
    result = started.end()
    assert result.code == 130, result.err
    assert "saving and stopping; Ctrl-C 3 times in all ends the run without saving" in result.err
    assert "it waits for data, and the run is asked to stop" in result.err
    saved = newest_good(run.checkpoints)
    assert saved is not None and saved.step == step_of(run) == 5


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
