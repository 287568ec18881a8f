"""Goodput, offers, history, mixed devices and tuned settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from weft.cli.views.plan import PlanOptions, show
from weft.cli.views.plan_tables import history_table
from weft.job import load_job, parse_job
from weft.job.errors import JobError
from weft.job.load import dump_yaml
from weft.job.schema import Failures
from weft.job.shapes import resolve
from weft.planner.advice.goodput import best_interval, expected, goodput
from weft.planner.advice.history import read_history
from weft.planner.advice.hyperparameters import tune
from weft.planner.advice.mixed_devices import mixed
from weft.planner.advice.offers import compare_offers
from weft.planner.advice.pinned_job import tuned_job, write_job
from weft.planner.calibration import load_calibration
from weft.planner.make_plan import make_plan, start_plan


def test_best_interval_is_near_youngs() -> None:
    mean, cost = 3 * 3600.0, 60.0
    best = best_interval(cost, mean, 300)
    assert best == pytest.approx(math.sqrt(2 * cost * mean), rel=0.06)
    share = best / expected(best, cost, mean, 300)
    for other in (0.5, 0.8, 1.25, 2.0):
        assert best * other / expected(best * other, cost, mean, 300) < share


def test_more_failures_mean_less_progress_and_more_checkpoints() -> None:
    def of(hours: float, **more: Any) -> Any:
        return goodput(Failures(device_hours=hours, **more), 16_384, 2048, 405e9, 5.0, background=False)

    usual = of(50_000)
    assert usual.hours_between_stops == pytest.approx(3.05, rel=0.01)
    assert 0.9 < usual.share < 1
    worse = of(5_000)
    assert worse.share < usual.share and worse.every < usual.every
    assert of(50_000, preemptions_per_day=0.1).share < usual.share
    assert of(50_000, restart_s=3000).share < usual.share
    assert of(1).share < 1e-6, "a run that stops before each checkpoint never ends"


def eight(model: str = "llama-8b", **cluster: Any) -> Any:
    return start_plan(
        parse_job(
            {
                "model": model,
                "data": {"source": "synthetic", "seq_len": 4096},
                "train": {"global_batch": 128, "steps": 1000},
                "cluster": {"device": "h100", "nodes": 2, "devices_per_node": 8, **cluster},
            }
        )
    )


def test_offers_side_by_side(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("clouds: {cloudA: {h100-sxm: [2.0, 1.0]}, cloudB: {h100-sxm: 2.5}}\nown: {capital_usd: 30000}\n")
    start = eight(catalog=str(mine))
    a, spot, b, own = compare_offers(start, ["cloudA", "cloudA:spot", "cloudB", "own"], load_calibration("weft"))
    assert a.usd == pytest.approx(a.days * 24 * 16 * 2.0)
    assert b.usd == pytest.approx(1.25 * a.usd)
    assert spot.usd < a.usd and spot.days > a.days and spot.goodput < a.goodput
    assert own.usd_hour == pytest.approx(30000 / (4 * 8760 * 0.85) + 0.7 * 0.85 * 1.35 * 0.12)
    with pytest.raises(JobError, match="unknown offer 'cloudC'; known: "):
        compare_offers(start, ["cloudC"], load_calibration("weft"))
    with pytest.raises(JobError, match="cloudB: no price for b200-sxm; it has h100-sxm"):
        compare_offers(start, ["cloudB:b200"], load_calibration("weft"))


def test_history_corrects_the_calibration(tmp_path: Path) -> None:
    start = eight()
    times = {"one": 2.0, "two": 2.2, "three": 2.1}
    for name, factor in times.items():
        job, plan = make_plan(start.job)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "job.yaml").write_text(dump_yaml(job))
        (folder / "plan.json").write_text(plan.dumps())
        took = plan.predicted["step_time_s"] * factor
        lines = [json.dumps({"step": i, "step_time_s": took * (3 if i == 0 else 1)}) for i in range(10)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 1')
    (tmp_path / "never").mkdir()
    output, better = read_history(tmp_path, "h100-sxm", load_calibration("weft"))
    assert {r.name for r in output.runs} == set(times)
    assert output.factor == pytest.approx(2.1, rel=1e-3)
    assert output.before == pytest.approx(0.52, abs=0.01) and output.after < 0.06
    again, _ = read_history(tmp_path, "h100-sxm", better)
    assert again.factor == pytest.approx(1.0, abs=0.02)
    other, same = read_history(tmp_path, "a100-sxm-80gb", load_calibration("weft"))
    assert other.factor == 1.0 and same == load_calibration("weft")
    with pytest.raises(JobError, match="no such folder"):
        read_history(tmp_path / "nowhere", "cpu", load_calibration("weft"))


def test_damaged_runs_are_skipped_and_counted(tmp_path: Path) -> None:
    plan = '{"device": "cuda", "device_name": "h100-sxm", "backend": "nccl"}'
    slow = '{"step_time_s": NaN}\n{"step_time_s": "x"}\n[1]\n{"step_time_s": -1}\n{"step_time_s": 1}\n'
    none, well = plan.replace("}", ', "virtual_stages": 0}'), '{"step_time_s": 1}\n' * 9
    job = "model: llama-8b\ncluster: {device: h100-sxm}\n"
    runs = {
        "a": ("{", "x", ""),
        "b": ("[]", "[]", "[]"),
        "c": (plan, "model: llama-8b\n", slow),
        "d": (none, job, well),
    }
    for name, files in runs.items():
        (tmp_path / name).mkdir()
        for file, text in zip(("plan.json", "job.yaml", "metrics.jsonl"), files, strict=True):
            (tmp_path / name / file).write_text(text)
    output, same = read_history(tmp_path, "h100-sxm", load_calibration("weft"))
    assert (output.runs, output.unread, output.factor) == ((), 4, 1.0) and same == load_calibration("weft")
    assert "4 folders could not be used" in history_table(output)


def test_a_run_without_progress_has_a_finite_time() -> None:
    failures = Failures(device_hours=1e-6)
    assert 0 < goodput(failures, 1024, 128, 8e9, 2.0).share < 1e-6


def test_two_kinds_of_devices_share_unevenly() -> None:
    ways = mixed(eight(nodes=1, also=[{"device": "a100"}]), load_calibration("weft"))
    by = {way.way: way for way in ways}
    shares = by["uneven shares of the batch"].parts
    assert sum(p.sequences for p in shares) == 128
    assert shares[0].sequences > shares[1].sequences > 0
    stages = by["uneven stages of a pipeline"].parts
    assert sum(p.blocks for p in stages) == 32
    assert stages[0].blocks > stages[1].blocks > 0
    assert ways[0].step_time_s < ways[0].alone_s
    turned = mixed(eight(device="a100", nodes=1, also=[{"device": "h100"}]), load_calibration("weft"))
    assert turned[0].step_time_s == pytest.approx(ways[0].step_time_s, rel=0.05), "the order of naming does not matter"


def test_tuned_settings() -> None:
    job = resolve(parse_job({"model": "llama-8b", "data": {"source": "synthetic", "seq_len": 4096}}))
    small, large = ({t.key: t for t in tune(job, 64, tokens)} for tokens in (1e10, 1e12))
    assert all(t.why for t in large.values())
    assert large["train.global_batch"].value > small["train.global_batch"].value
    assert large["train.global_batch"].value % 64 == 0
    assert large["optim.lr"].value < small["optim.lr"].value
    batch, ramp = large["train.global_batch"].value, large["train.batch_ramp"].value
    assert [batch / size for _, size in ramp] == pytest.approx([4, 2], rel=0.1), "a quarter, then half of the batch"
    trained = tuned_job(job, list(large.values())).train
    assert trained.ramp.samples_before(trained.steps) * 4096 == pytest.approx(1e12, rel=0.001), (
        "the steps fit the budget"
    )
    assert trained.ramp.samples_before(trained.ramp.end) * 4096 == pytest.approx(0.05e12, rel=0.01)
    short = {t.key: t.value for t in tune(job, 64, 1e7)}
    assert 0 < short["optim.warmup"] <= short["train.steps"] / 10


def test_an_applied_plan_is_planned_the_same_way_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft plan --tune --apply FILE`: the file has the layout and the tuned settings, and its own plan is the same."""
    raw = {"model": "llama-8b", "data": {"source": "synthetic", "seq_len": 4096}, "train": {"steps": 5000}}
    raw["cluster"] = {"device": "h100", "nodes": 2, "devices_per_node": 8}
    made = show(parse_job(raw), None, PlanOptions(tune=True, apply=True))
    assert made.job is not None
    path = write_job(made.job, tmp_path / "planned.yaml")
    again = load_job(str(path))
    assert again == made.job.model_copy(update={"name": again.name})
    assert again.train.batch_ramp and again.train.global_batch != 32 and again.parallel != "auto"
    _, plan = make_plan(again)
    for key in ("axes", "microbatch", "accumulation", "recompute", "precision"):
        assert plan.to_json()[key] == made.data[key]
    with pytest.raises(JobError, match="exists and is not a regular file"):
        write_job(made.job, tmp_path)
