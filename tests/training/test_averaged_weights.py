"""Evaluations of a run with train.ema are of its averaged weights, and change nothing in the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import on_ranks
from helpers.command import weft
from helpers.parity import check, make_job, section

from weft.launch.rank_pool import RankPool
from weft.optim.ema import Ema
from weft.planner import make_plan
from weft.watch.journal import read_jsonl


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_averaged_weights_are_evaluated(precision: str) -> None:
    job, plan = make_plan(make_job("train.ema=0.9", "optim.lr=0.1", f"precision={precision}", parallel=section("1")), 1)
    *_, stepper, loader = on_ranks.begin((job, plan))
    held_out = [next(loader)]
    state = stepper.state
    for _, batches in zip(range(3), loader, strict=False):
        stepper.update(stepper.gradients(batches), stepper.learning_rate())
    before = {n: t.clone() for n, t in state.tensors().items()}
    computed = {n: t.clone() for n, t in state.model.compute_params.items()}
    averaged = stepper.evaluate(held_out)
    assert all(torch.equal(t, before[n]) for n, t in state.tensors().items())
    assert all(torch.equal(t, computed[n]) for n, t in state.model.compute_params.items())
    averages = state.ema.averages
    state.ema = Ema(state.model.master_params, 0.0)
    raw = stepper.evaluate(held_out)
    with torch.no_grad():
        for name, average in averages.items():
            state.model.master_params[name].copy_(average)
    state.model.refresh()
    assert averaged == stepper.evaluate(held_out) != raw


def test_the_evaluation_is_that_of_one_process(pool: RankPool) -> None:
    """compared() covers the evaluation that observe() makes after the last step."""
    check(pool, make_job("train.ema=0.5", "optim.lr=0.01"), ("dp_shard 2 zero=3", "dp_shard 2 zero=1", "pp 2"), steps=2)


def test_a_run_says_that_it_evaluates_averages(tmp_path: Path) -> None:
    result = weft(
        tmp_path, "train", "tiny", "name=averaged", "train.steps=2", "train.eval_every=1", "train.ema=0.9",
        "--nproc", "1",
    )  # fmt: skip
    assert result.code == 0, result.err
    text = result.out + result.err
    assert "(averaged weights)" in text and ", validation loss of the averaged weights " in text
    events = [e for e in read_jsonl(tmp_path / "runs" / "averaged" / "events.jsonl") if e.get("event") == "eval"]
    assert len(events) == 3 and all(e["averaged"] for e in events)
