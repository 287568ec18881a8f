"""What a pinned layout would gain on auto: `weft plan` and `weft train` say it when it is worth a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from helpers.command import Output

from weft.job.load import load_job
from weft.planner.advice.auto_gain import auto_gain
from weft.planner.make_plan import make_plan

PINNED = ("parallel={dp_shard: 8, zero: 3, tp: 8}", "memory.recompute=full", "train.microbatch=1")
SETTINGS = ("parallel=auto", "memory.recompute=auto", "train.microbatch=auto")


def test_the_gain_of_a_slow_layout() -> None:
    job = load_job("llama-70b-64xh100", PINNED)
    _, plan = make_plan(job)
    gain = auto_gain(job, plan)
    assert gain is not None
    assert gain.settings == SETTINGS
    assert gain.step_time_s == make_plan(load_job("llama-70b-64xh100"))[1].predicted["step_time_s"]
    assert gain.share > 0.4
    assert f"instead of {plan.predicted['step_time_s']:.3g} s" in str(gain)


def test_nothing_is_said_where_little_is_gained() -> None:
    job = load_job("llama-70b-64xh100")
    _, plan = make_plan(job)
    assert auto_gain(job, plan) is None, "nothing is pinned"
    same = {axis: getattr(plan, axis) for axis in ("dp_replicate", "dp_shard", "zero", "tp", "cp", "cp_style", "pp")}
    pinned = load_job("llama-70b-64xh100", [f"parallel={json.dumps(same)}"])
    assert auto_gain(pinned, make_plan(pinned)[1]) is None, "the planner's own layout is pinned"


def test_the_plan_says_it(in_process: Callable[..., Output], tmp_path: Path) -> None:
    shown = in_process(tmp_path, "plan", "llama-8b-8xh100", "parallel={dp_shard: 8}", "memory.recompute=full")
    assert "\nfaster     parallel=auto memory.recompute=auto would take " in shown.out
    data = json.loads(in_process(tmp_path, "plan", "llama-8b-8xh100", "memory.recompute=full", "--json").out)
    assert data["auto"]["settings"] == ["memory.recompute=auto"]
