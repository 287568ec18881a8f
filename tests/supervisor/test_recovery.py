"""A run with killed, stopped and hung processes ends bit-identical to the undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.command import DEADLINE_S, Output, ids_by_step, losses, python, run_of, strays, weft, write_job
from helpers.self_faults import memory_of, write_orders

from weft.checkpoint.format import list_checkpoints
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
