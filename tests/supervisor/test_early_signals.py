"""Signals before the ranks have started."""

from __future__ import annotations

import signal
from pathlib import Path

from helpers.command import Started, run_of, until, write_job

from weft.supervisor.run_lock import run_lock


def listens(pid: int) -> bool:
    """Whether a process has something to do when SIGTERM comes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_sigterm_before_ranks_start_exits_with_preempted(tmp_path: Path) -> None:
    write_job(tmp_path, train={"steps": 3, "global_batch": 4})
    run = run_of(tmp_path, "early")
    with run_lock(run):  # so that it cannot get any further
        started = Started(tmp_path, "train", "job.yaml", "name=early", "--nproc", "2")
        until(lambda: listens(started.process.pid))
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(120) == 75
    assert not run.metrics.exists()
