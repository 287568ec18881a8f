"""Everything that `weft plan`, `weft estimate` and --why-not report of a job comes from one estimator and agrees."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from weft.hardware.probe import probe
from weft.job import parse_job
from weft.job.errors import JobError
from weft.planner.advice.why_not import why_not
from weft.planner.job_estimate import estimate_job
from weft.planner.make_plan import make_plan, start_plan
from weft.planner.search.candidates import Layouts
from weft.planner.search.frontier import TIME_TOLERANCE
from weft.planner.search.survey import survey

JOBS, PARTS = 500, 10
PINNED: tuple[dict[str, Any], ...] = (
    {"dp_shard": -1, "zero": 1}, {"dp_shard": -1, "zero": 2}, {"dp_shard": -1, "zero": 3}, {"dp_replicate": -1},
    {"tp": 2, "dp_shard": -1}, {"pp": 2, "dp_shard": -1}, {"cp": 2, "dp_shard": -1}, {"tp": 2, "pp": 2},
)  # fmt: skip
"""Layouts of the jobs that do not leave them open, in part; their search is short."""
MODELS: tuple[Any, ...] = (
    "tiny", "llama-1b", "llama-8b", "llama-13b", "llama-70b", "gpt2-125m", "gpt2-1.5b", "moe-tiny", "qwen3-30b-a3b",
    "mlp",
    {"family": "vit", "dim": 768, "layers": 12, "heads": 12, "ffn": 3072, "vocab": 1000},
)  # fmt: skip
DEVICES = ("a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "v100-sxm-32gb", "l40s", "b200")


def random_job(rng: random.Random) -> Any:
    nodes, per_node = rng.choice((1, 1, 1, 2)), rng.choice((1, 2, 4, 8))
    job: dict[str, Any] = {
        "model": rng.choice(MODELS),
        "data": {"source": "synthetic", "seq_len": rng.choice((512, 1024, 4096, 8192, 32768))},
        "train": {"global_batch": nodes * per_node * rng.choice((1, 2, 6, 16, 32))},
        "optim": {"name": rng.choice(("adamw", "sgd", "muon", "adafactor", "lars", "lamb"))},
        "precision": rng.choice(("bf16", "bf16", "fp8", "fp32", "fp16")),
        "memory": {"recompute": rng.choice(("auto", "auto", "none", "full"))},
        "cluster": {"device": rng.choice(DEVICES), "nodes": nodes, "devices_per_node": per_node},
    }
    if rng.random() < 0.75:
        job["parallel"] = rng.choice(PINNED)
    if rng.random() < 0.2:
        job["train"]["ema"] = 0.999
    return job


@pytest.mark.parametrize("part", range(PARTS))
def test_all_reports_of_a_job_agree(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reasons", "gains_of_other_settings"):  # further searches, which take most of the time
        monkeypatch.setattr(f"weft.planner.search.survey.{name}", lambda *args, **kwargs: [])
    machine = probe()
    for module in ("make_plan", "job_estimate"):
        monkeypatch.setattr(import_module(f"weft.planner.{module}"), "probe", lambda: machine)
    rng, made = random.Random(part), 0
    while made < JOBS // PARTS:
        raw = random_job(rng)
        try:
            start = start_plan(parse_job(raw))
            found = survey(start, top=3, front=False)
        except JobError:  # settings that exclude each other
            continue
        made += 1
        _check(raw, found)
        if made % 5 == 0 or not found.runner_ups:  # of the others, _check estimates a runner-up again
            assert found.estimate == estimate_job(found.job, found.plan)


def _check(raw: Any, made: Any) -> None:
    output, plan, limit = made.estimate, made.plan, made.found.estimator.limit_gib
    assert sum(output["memory"].values()) == pytest.approx(output["peak_memory_gib"], rel=1e-12), raw
    assert min(output["memory"].values()) >= -1e-9, raw
    assert plan.predicted["memory_gib"] == pytest.approx(output["peak_memory_gib"], rel=1e-12), raw
    if "step_time_s" in plan.predicted:
        assert plan.predicted["step_time_s"] == pytest.approx(output["step_time_s"], rel=1e-12), raw
    if not made.fits:
        assert output["peak_memory_gib"] > limit and not output["fits"], raw
        return
    assert output["fits"] and output["peak_memory_gib"] <= limit, raw
    assert output["step_time_s"] == pytest.approx(float(made.found.times[0]), rel=1e-9), raw
    assert output["peak_memory_gib"] == pytest.approx(float(made.found.peaks[0]), rel=1e-9), raw
    if others := made.runner_ups:
        times, peaks = np.array([o.raw_step_time_s for o in others]), np.array([o.peak_gib for o in others])
        assert np.all(peaks <= limit) and np.all(output["step_time_s"] <= times * (1 + TIME_TOLERANCE)), raw
        again = made.found.estimator.estimate(Layouts.join([Layouts.one(other.plan) for other in others]))
        assert again.peak_gib == pytest.approx(peaks, rel=1e-9) and again.step_time_s == pytest.approx(times, rel=1e-9)
        printed = estimate_job(made.job, others[-1].plan)
        assert printed["peak_memory_gib"] == pytest.approx(peaks[-1], rel=1e-9), (raw, others[-1].plan.layout())
        assert printed["step_time_s"] == pytest.approx(times[-1], rel=1e-9), (raw, others[-1].plan.layout())
    axes = " ".join(f"{axis}={degree}" for axis, degree in plan.axes.items() if degree > 1)
    if made.job.parallel == "auto" and axes and plan.pp == 1:
        asked = why_not(made, f"{axes} zero={plan.zero} microbatch={plan.microbatch}" if plan.dp_shard > 1 else axes)
        assert asked["verdict"] in ("as fast", "faster", "slower", "fits"), (raw, asked)
        assert asked["step_time_s"] <= output["step_time_s"] * (1 + TIME_TOLERANCE), (raw, asked)


@pytest.mark.parametrize("device", ["cpu", "l40s"])
def test_a_plan_is_the_layout_of_the_run(device: str) -> None:
    """Also where shards would be a little faster than the replicas that runs on CPUs prefer."""
    raw = {
        "model": {"dim": 896, "layers": 14, "heads": 14, "kv_heads": 2, "ffn": 4864, "vocab": 151936, "tied": True},
        "data": {"source": "synthetic", "seq_len": 128}, "train": {"global_batch": 3},
        "cluster": {"device": device, "nodes": 1, "devices_per_node": 3, "memory_gib": 8 if device == "cpu" else None},
    }  # fmt: skip
    shown = survey(start_plan(parse_job(raw)), top=3, front=False).plan
    assert (shown.layout(), shown.reasons) == ((run := make_plan(parse_job(raw))[1]).layout(), run.reasons)
    assert device != "cpu" or shown.layout() == "dp_replicate 3"


def test_runners_up_have_their_states_where_a_run_would_keep_them() -> None:
    raw: Any = {
        "model": "llama-1b", "data": {"source": "synthetic", "seq_len": 2048}, "train": {"global_batch": 16},
        "cluster": {"device": "rtx-4090", "nodes": 1, "devices_per_node": 4},
        "memory": {"offload": "states", "host_gib": 64},
    }  # fmt: skip
    made = survey(start_plan(parse_job(raw)), top=4, front=False, beyond=False)
    assert len(made.runner_ups) == 3
    for other in made.runner_ups:
        printed = estimate_job(made.job, other.plan)
        assert printed["peak_memory_gib"] == pytest.approx(other.peak_gib, rel=1e-9), other.plan.layout()
        assert printed["step_time_s"] == pytest.approx(other.raw_step_time_s, rel=1e-9), other.plan.layout()
        assert made.estimate["step_time_s"] <= other.raw_step_time_s * (1 + TIME_TOLERANCE)
        assert other.plan.homes and other.peak_gib <= made.found.estimator.limit_gib
    axes = " ".join(f"{axis}={degree}" for axis, degree in other.plan.axes.items())
    asked = why_not(made, f"{axes} zero={other.plan.zero} microbatch={other.plan.microbatch}")
    assert (asked["step_time_s"], asked["peak_memory_gib"]) == (other.raw_step_time_s, other.peak_gib)
