"""A run with killed, stopped and hung processes ends bit-identical to the undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import command
from helpers.command import Started, ids_by_step, losses, run_of, step_of, strays, weft, write_job

from weft.checkpoint.format import list_checkpoints
from weft.checkpoint.reader import load_full
from weft.job.run_folder import RunDir
from weft.supervisor.process_manager import pointer_path
from weft.supervisor.status_board import Record, StatusBoard
from weft.watch.journal import read_jsonl

STEPS = 65
JOB: dict[str, Any] = {
    "model": {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 32, "dropout": 0.1, "tied": True},
    "data": {"seq_len": 16, "record_ids": True},
    "train": {"steps": STEPS, "global_batch": 8, "microbatch": 2, "eval_every": 25, "eval_batches": 1, "ema": 0.9},
    "optim": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {"every": 15},
    "parallel": {"dp_shard": 2, "zero": 2},
    "cluster": {"device": "cpu"},
    "resilience": {"rebalance": False},  # which is the same run within rounding only
}
FAULTS = [("exit", 1), ("exit", 0), ("supervisor", None), ("stopped", 1), ("hang", 1)]


def board_of(run: RunDir) -> StatusBoard:
    return StatusBoard(Path(json.loads(pointer_path(run).read_text(encoding="utf-8"))["folder"]) / "board")


def ranks_of(board: StatusBoard) -> dict[int, Record]:
    """The ranks of the current attempt."""
    return {r.rank: r for r in board.records() if r.rank >= 0 and r.attempt == board["attempt"] and r.phase != "gone"}


def training(board: StatusBoard, step: int) -> bool:
    found = ranks_of(board)
    return len(found) == 2 and all(r.step >= step for r in found.values())


def test_run_with_faults_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed: a rank, rank 0, the supervisor. Stopped: a rank. Then one sleeps in the middle of a step."""
    write_job(tmp_path, **JOB)
    assert weft(tmp_path, "train", "job.yaml", "name=calm", "--no-resilient").code == 0
    orders = tmp_path / "orders.json"
    order = {"id": 1, "kind": "sleep", "rank": 1, "step": 50, "phase": "backward", "moment": 0.5}
    orders.write_text(json.dumps([order]), encoding="utf-8")
    monkeypatch.setitem(command.ENV, "WEFT_FAULTS", str(orders))
    monkeypatch.setitem(command.ENV, "WEFT_RANK_MODULE", "weft.chaos.faulty_rank")
    run = run_of(tmp_path, "hit")
    started = Started(tmp_path, "train", "job.yaml", "name=hit")
    started.wait_for(lambda: step_of(run) >= 1)
    board = board_of(run)
    moments = [(6, 1, signal.SIGKILL), (17, 0, signal.SIGKILL), (28, None, signal.SIGKILL), (39, 1, signal.SIGSTOP)]
    for step, rank, number in moments:
        started.wait_for(lambda: training(board, step))  # noqa: B023
        os.kill(board["supervisor"] if rank is None else ranks_of(board)[rank].pid, number)
    result = started.end()
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
    assert strays(["weft.training.supervised_rank", "runs/hit"]) == []
    assert not board.path.parent.exists()


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
    write_job(tmp_path, **{**JOB, "parallel": {"dp_shard": 1}, "train": {**JOB["train"], "steps": 40}})
    assert weft(tmp_path, "train", "job.yaml", "name=calm", "--no-resilient").code == 0
    run = run_of(tmp_path, "hit")
    started = Started(tmp_path, "train", "job.yaml", "name=hit")
    started.wait_for(lambda: step_of(run) >= 10)
    board = board_of(run)
    os.kill(ranks_of(board)[0].pid, signal.SIGKILL)
    result = started.end()
    assert result.code == 0, result.err
    recovered = [e for e in read_jsonl(run.events) if e["event"] == "recovered"]
    assert len(recovered) == 1 and recovered[0]["steps_lost"] <= 1
    _assert_same(tmp_path, "hit", "calm")
