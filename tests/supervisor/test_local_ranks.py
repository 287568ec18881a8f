"""Exit codes and last lines of failed and interrupted local runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.command import Started, run_of, write_job

from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.supervisor.failure_report import explain_failure, read_failure, remove_failures, write_failure
from weft.supervisor.stop_signals import KILL_AFTER_INTERRUPTS


def test_third_interrupt_kills_a_hung_run(tmp_path: Path) -> None:
    """The run ends as interrupted without a checkpoint, and no rank is blamed."""
    write_job(
        tmp_path, model="helpers.own_models:Stuck", data={"seq_len": 8}, train={"global_batch": 2, "eval_every": 0},
        parallel={"dp_shard": 1}, cluster={"device": "cpu"},
    )  # fmt: skip
    started = Started(tmp_path, "train", "job.yaml", "--no-resilient")
    started.wait_for((tmp_path / "stuck").exists)
    ranks = started.ranks()
    started.wait_for_end(lambda: started.process.send_signal(signal.SIGINT))
    result = started.end()
    assert result.code == Exit.INTERRUPTED
    assert result.last == "stopped without saving; start the same command again to resume from the last checkpoint"
    assert "SIGKILL" not in result.err
    assert "Traceback" not in result.err
    assert not any(rank.is_running() for rank in ranks)
    assert not run_of(tmp_path, "job").checkpoints.exists()
    assert KILL_AFTER_INTERRUPTS == 3


@pytest.mark.parametrize("left", ["", "{", "\x00" * 9, None])
def test_unreadable_failure_record_is_ignored(tmp_path: Path, left: str | None) -> None:
    """A rank may be killed while it writes its failure record."""
    run = RunDir(tmp_path)
    run.logs.mkdir()
    path = run.logs / "failure-0.json"
    if left is None:
        path.mkdir()
    else:
        path.write_text(left, encoding="utf-8")
    result: list[str] = []
    assert explain_failure(run, [3], 0, [], result.append) == Exit.DIFFERS
    assert result == [f"rank 0 ended with code 3 without a failure record; log: {run.logs / 'rank-0.log'}"]
    result.clear()
    assert explain_failure(run, [-signal.SIGKILL], 0, [], result.append) == Exit.DIFFERS
    assert result[0].startswith("rank 0 was killed by SIGKILL; if nobody sent it, memory may have run out")


def test_failure_record_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the log folder cannot be written: the supervisor finds the record in the memory folder."""
    run, lines = RunDir(tmp_path / "run"), list[str]()
    run.path.mkdir()
    (tmp_path / "memory").mkdir()
    cause = {
        "rank": 1, "position": "dp_shard1", "time": 1.0, "kind": "MachineError", "message": "No space left on device",
        "where": "", "expected": True, "echo": False, "machine": False, "code": int(Exit.MACHINE),
    }  # fmt: skip
    write_failure(run, 1, cause)  # not supervised: nothing can be done
    monkeypatch.setenv("WEFT_MEMORY", str(tmp_path / "memory"))
    write_failure(run, 1, cause)
    assert explain_failure(run, [0, 4], 1, [], lines.append) == Exit.MACHINE
    assert "No space left on device" in lines[-1]
    remove_failures(run)
    assert read_failure(run.logs / "failure-1.json") is None
