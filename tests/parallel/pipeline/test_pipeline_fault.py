"""A pipeline with a lost rank ends, names the rank, and resumes when it is started again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Started, losses, python, run_of, weft, write_job
from helpers.self_faults import write_orders

from weft.job.errors import Exit
from weft.training.rank import exit_code, is_peer_failure

STEPS, TIMEOUT_S = 12, 20
JOB: dict[str, Any] = {
    "name": "run",
    "model": {"family": "llama", "dim": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 64},
    "data": {"source": "synthetic", "seq_len": 16},
    "train": {"steps": STEPS, "global_batch": 8, "eval_every": 0},
    "checkpoint": {"every": 4},
    "parallel": {"pp": 2, "dp_shard": 1, "microbatches": 4},
    "comm": {"timeout_s": TIMEOUT_S},
    "cluster": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """A run whose rank 0 is stopped. The timeout elapses while the other test runs."""
    folder = tmp_path_factory.mktemp("stopped")
    write_job(folder, **JOB)
    orders = write_orders(folder, {"kind": "stop", "rank": 0, "step": 3})
    return Started(folder, "train", "job.yaml", "--no-resilient", **orders)


@pytest.mark.usefixtures("stopped")
def test_killed_rank_ends_the_run_which_then_resumes(tmp_path: Path) -> None:
    write_job(tmp_path, **{**JOB, "checkpoint": {"every": 4, "background": False}})
    run = run_of(tmp_path, "run")
    orders = write_orders(tmp_path, {"kind": "kill", "rank": 1, "step": 7})
    result = python(tmp_path, "-m", "weft", "train", "job.yaml", "--no-resilient", **orders)
    assert result.code == Exit.DIFFERS
    assert result.err.splitlines()[-2].startswith("rank 1 was killed by SIGKILL")
    assert result.last == "log: runs/run/logs/rank-1.log; start the same command again to resume"

    again = weft(tmp_path, "train", "job.yaml")
    assert again.code == Exit.DONE, again.err
    resumed = re.search(r"resumed from step (\d+)", again.err)
    assert resumed and int(resumed[1]) in range(4, STEPS, 4), again.err
    output = losses(run)
    assert list(output) == list(range(1, STEPS + 1))
    assert all(len(set(values)) == 1 for values in output.values()), "a repeated step had another loss"


def test_stopped_rank_is_named_after_the_timeout(stopped: Started) -> None:
    result = stopped.end()
    assert result.code == Exit.HANG
    assert result.err.splitlines()[-2].startswith("rank 0 did not respond; rank 1 (pp1) waited in ")
    assert result.last == (
        "log: runs/run/logs/rank-0.log; start the same command again to resume, with a longer comm.timeout_s if it was "
        "only slow"
    )


def test_closed_pair_is_a_timeout_not_a_peer_failure() -> None:
    """Gloo closes a pair after a timeout of this rank; later waits on it fail with this message."""
    error = RuntimeError("Application timeout caused pair closure")
    assert exit_code(error) == Exit.HANG and not is_peer_failure(error)
