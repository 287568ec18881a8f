"""A run with killed, stopped and hung processes ends bit-identical to the undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.command import DEADLINE_S, Output, ids_by_step, losses, python, run_of, step_of, strays, weft, write_job
from helpers.self_faults import memory_of, write_orders

from weft.checkpoint.format import list_checkpoints, newest_good
from weft.checkpoint.reader import load_full
from weft.job.errors import Exit
from weft.watch.journal import read_jsonl

STEPS = 30
JOB: dict[str, Any] = {
    "model": {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 32, "dropout": 0.1, "tied": True},
    "data": {"seq_len": 16, "record_ids": True},
    "train": {"steps": STEPS, "global_batch": 8, "microbatch": 2, "eval_every": 12, "eval_batches": 1, "ema": 0.9},
    "optim": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {"every": 10},
    "parallel": {"dp_shard": 2, "zero": 2},
    "cluster": {"device": "cpu"},
    "resilience": {"rebalance": False},  # which is the same run within rounding only
}
FAULTS = [("exit", 1), ("exit", 0), ("supervisor", None), ("stopped", 1), ("hang", 1)]


def test_run_with_faults_is_bit_identical(tmp_path: Path) -> None:
    """Killed: a rank, rank 0, the supervisor. Stopped: a rank. Then one sleeps in the middle of a step."""
    write_job(tmp_path, **JOB)
    assert weft(tmp_path, "train", "job.yaml", "name=calm", "--no-resilient").code == 0
    orders = [("kill", 1, 4), ("kill", 0, 9), ("supervisor", 0, 14), ("stop", 1, 19), ("sleep", 1, 26)]
    result = run_with(tmp_path, *({"kind": kind, "rank": rank, "step": step} for kind, rank, step in orders))
    run = run_of(tmp_path, "hit")
    assert result.code == 0, result.err
    faults = [e for e in read_jsonl(run.events) if e["event"] == "fault"]
    output = [(e["fault"], e["rank"]) for e in faults]
    for wanted in FAULTS:
        assert wanted in output, result.err
    hang = next(e for e in faults if e["fault"] == "hang" and e["rank"] == 1)
    assert "sleep_forever" in hang["stack"]
    assert hang["position"] == "dp_shard1"
    recovered = [e for e in read_jsonl(run.events) if e["event"] == "recovered"]
    assert len(recovered) >= len(FAULTS)
    assert all(e["steps_lost"] <= 1 for e in recovered)
    assert "rank 1 (dp_shard1) was killed by SIGKILL" in result.err
    _assert_same(tmp_path, "hit", "calm")
    assert strays(["helpers.self_faults", "runs/hit"]) == []
    assert not memory_of(tmp_path).exists()


def run_with(folder: Path, *orders: dict[str, Any], changes: Sequence[str] = ("name=hit",)) -> Output:
    """Train the run `hit` with these faults."""
    command = ("-m", "weft", "train", "job.yaml", *changes)
    return python(folder, *command, deadline_s=3 * DEADLINE_S, **write_orders(folder, *orders))


def test_run_with_a_stopped_supervisor_recovers_and_ends_on_a_signal(tmp_path: Path) -> None:
    """It is replaced while the ranks train, and when they have ended after SIGTERM. So is the process that forks ranks
    once one is needed."""
    write_job(tmp_path, **JOB)
    orders = [("stop supervisor", 1, 5), ("stop fork server", 1, 6), ("kill", 0, 7), ("kill", 1, 12)]
    orders += [("stop supervisor", 0, 20), ("launcher SIGTERM", 0, 20)]
    result = run_with(tmp_path, *({"kind": kind, "rank": rank, "step": step} for kind, rank, step in orders))
    run = run_of(tmp_path, "hit")
    assert result.code == Exit.PREEMPTED, result.err
    faults = [(e["fault"], e["why"]) for e in read_jsonl(run.events) if e["event"] == "fault"]
    stopped = ("supervisor", "the supervisor was stopped by a signal and is replaced")
    assert faults[0] == faults[-1] == stopped, result.err
    assert {kind for kind, _ in faults[1:-1]} <= {"exit", "stopped"}, result.err
    newest = newest_good(run.checkpoints)
    assert newest is not None and newest.step == step_of(run) >= 14
    assert strays(["helpers.self_faults", "runs/hit"]) == []


def test_ranks_that_are_lost_while_others_connect(tmp_path: Path) -> None:
    """Rank 0 is killed while rank 1 connects to it: rank 1 is replaced too, since torch has counted its groups. In the
    next recovery rank 0 hangs there after SIGTERM: the ranks are replaced, and save."""
    write_job(tmp_path, **JOB)
    orders = [("kill", 1, 4, "backward"), ("kill", 0, 2, "connect"), ("kill", 1, 9, "backward")]
    orders += [("launcher SIGTERM", 0, 4, "connect"), ("sleep", 0, 4, "connect")]
    result = run_with(
        tmp_path, *({"kind": kind, "rank": rank, "step": step, "phase": phase} for kind, rank, step, phase in orders)
    )
    run = run_of(tmp_path, "hit")
    assert result.code == Exit.PREEMPTED, result.err
    faults = [e for e in read_jsonl(run.events) if e["event"] == "fault"]
    assert [(e["fault"], e["rank"]) for e in faults] == [("exit", 1), ("exit", 0), ("exit", 1), ("hang", None)]
    assert [e["step"] >= step for e, step in zip(faults, (2, 2, 7, 7), strict=True)] == [True] * 4, "it has steps"
    assert "all ranks: they do not connect, and the run is asked to stop" in result.err
    newest = newest_good(run.checkpoints)
    assert newest is not None and newest.step == step_of(run) >= 7
    assert "stopped and saved; the same command continues from here" in result.err


def _assert_same(folder: Path, name: str, other: str) -> None:
    one, two = run_of(folder, name), run_of(folder, other)
    calm = losses(two)
    assert list(losses(one)) == list(calm)
    for step, values in losses(one).items():
        assert set(values) == set(calm[step])
    assert ids_by_step(one) == ids_by_step(two)
    final = [load_full(list_checkpoints(run.checkpoints)[-1]) for run in (one, two)]
    assert final[0].keys() == final[1].keys()
    assert all(torch.equal(final[0][n], final[1][n]) for n in final[0])


def test_single_rank_survives_a_kill(tmp_path: Path) -> None:
    write_job(tmp_path, **{**JOB, "parallel": {"dp_shard": 1}, "train": {**JOB["train"], "steps": 12}})
    assert weft(tmp_path, "train", "job.yaml", "name=calm", "--no-resilient").code == 0
    result, run = run_with(tmp_path, {"kind": "kill", "rank": 0, "step": 6}), run_of(tmp_path, "hit")
    assert result.code == 0, result.err
    recovered = [e for e in read_jsonl(run.events) if e["event"] == "recovered"]
    assert len(recovered) == 1 and recovered[0]["steps_lost"] <= 1
    _assert_same(tmp_path, "hit", "calm")
    disk = [f"memory.disk={tmp_path / 'disk'}", "memory.offload=states", "memory.disk_gib=0.1"]
    homes = ["memory.homes.moments=disk", "memory.homes.averages=host"]
    changes = ["name=disk", "checkpoint.every=4", "checkpoint.background=false", *disk, *homes]
    order = {"kind": "kill", "rank": 0, "step": 6, "phase": "update", "id": 1}
    result = run_with(tmp_path, order, changes=changes)
    assert result.code == 0, result.err
    recovered = [e for e in read_jsonl(run_of(tmp_path, "disk").events) if e["event"] == "recovered"]
    assert len(recovered) == 1 and recovered[0]["steps_lost"] <= 2
    _assert_same(tmp_path, "disk", "calm")


def test_rank_that_exits_with_0_before_the_end_is_a_failure(tmp_path: Path) -> None:
    write_job(tmp_path, **{**JOB, "train": {**JOB["train"], "steps": 5}})
    result = run_with(tmp_path, {"kind": "exit", "rank": 1, "step": 2})
    assert result.code == Exit.DIFFERS, result.err
    assert "weft: rank 1 ended with exit code 0 in step 2, before the run was over; os._exit in code" in result.last
