"""Search spaces, successive halving, samplers, and `weft tune` on a small job."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.command import python, write_job
from helpers.forked_python import WITH_TWIN

from weft.data.open_dataset import open_dataset
from weft.extensions.tune.search_space import SAMPLERS, Dimension, parse_space
from weft.extensions.tune.speed import find_fastest
from weft.extensions.tune.successive_halving import Trial, rungs, successive_halving
from weft.extensions.tune.trial_plot import draw_trials
from weft.extensions.tune.trial_runner import ranks_of_trial
from weft.job.errors import JobError
from weft.job.load import load_job, parse_job
from weft.job.shapes import resolve

JOB = {
    "model": {"shape": "mlp-tiny"}, "train": {"steps": 4, "global_batch": 4, "eval_every": 2, "eval_batches": 1},
    "cluster": {"device": "cpu"}, "data": {"source": "synthetic"},
}  # fmt: skip


def test_a_space_has_ranges_and_lists() -> None:
    rate, batch = parse_space("optim.lr=1e-4..3e-3,train.global_batch=8,16")
    assert (rate.low, rate.high, rate.log, rate.whole) == (1e-4, 3e-3, True, False)
    assert (batch.key, batch.values) == ("train.global_batch", (8, 16))
    assert [rate.at(0.0), rate.at(0.5), rate.at(1.0)] == pytest.approx([1e-4, 5.477e-4, 3e-3])
    assert parse_space("train.global_batch=4..16")[0].at(0.5) == 10
    assert parse_space("optim.schedule=cosine,wsd,train.compile=true")[1].values == (True,)


@pytest.mark.parametrize("text", ["optim.lr", "optim.lr=", "optim.lr=2..1", "optim.lr=1..x", "a=1,a=2", "lr=nan..1"])
def test_a_wrong_space_is_one_sentence(text: str) -> None:
    with pytest.raises(JobError) as error:
        parse_space(text)
    assert "\n" not in str(error.value)


def test_rungs_divide_trials_and_multiply_steps() -> None:
    assert rungs(900, 9, 3) == [(100, 9), (300, 3), (900, 1)]
    assert rungs(4, 2, 2) == [(2, 2), (4, 1)]
    assert rungs(10, 1, 3) == [(10, 1)]
    assert sum(steps * trials for steps, trials in rungs(900, 9, 3)) * 3 <= 900 * 9


@pytest.mark.parametrize("name", SAMPLERS)
def test_halving_finds_the_best_rate(name: str) -> None:
    space = parse_space("optim.lr=1e-4..1e-1,train.global_batch=8,16")
    continued: list[tuple[int, int, int]] = []

    def loss(trial: Trial, until: int) -> float:
        continued.append((trial.number, trial.steps, until))
        rate = trial.values["optim.lr"]
        return math.inf if rate > 5e-2 else abs(math.log10(rate / 3e-3)) + 1 / until

    def run(trials: list[Trial], until: int) -> list[float]:
        sizes.append(len(trials))
        return [loss(trial, until) for trial in trials]

    sizes: list[int] = []
    trials = successive_halving(SAMPLERS[name](space, 0), 900, 27, 3, run, at_once=4)
    assert sizes == ([27, 9, 3, 1] if name == "even" else [4, 4, 4, 4, 4, 4, 3, 9, 3, 1])
    best = trials[0]
    assert 0.5 < best.values["optim.lr"] / 3e-3 < 2 and best.steps == 900
    assert [t for t in continued if t[0] == best.number] == [
        (best.number, 0, 33), (best.number, 33, 100), (best.number, 100, 300), (best.number, 300, 900)
    ]  # fmt: skip
    assert sum(t.steps for t in trials) * 3 < 900 * 27
    picture = draw_trials(trials, space)
    assert picture.count("<circle") == 1 + 2 * sum(math.isfinite(t.loss) for t in trials), "the legend has one"
    assert picture.count(">loss</text>") == 2, "each panel has an axis of losses"
    for named in (">0.0001<", ">optim.lr, logarithmic<", ">8<", ">16<", ">train.global_batch<", "prefers-color-scheme"):
        assert named in picture


def test_ranks_of_a_module_whose_memory_is_not_planned() -> None:
    job = parse_job({"model": "helpers.own_models:Plain", "data": {"source": "pydoc"}, "cluster": {"device": "cpu"}})
    assert ranks_of_trial(job, None) == 1


def test_the_even_sampler_is_the_same_for_a_seed() -> None:
    space = (Dimension("a", (), 0.0, 1.0), Dimension("b", (1, 2, 3)))
    first, second = (SAMPLERS["even"](space, 5) for _ in range(2))
    assert [first.ask() for _ in range(6)] == [second.ask() for _ in range(6)]
    every = SAMPLERS["even"]((Dimension("a", tuple(range(9))),), 0)
    assert sorted(every.ask()["a"] for _ in range(9)) == list(range(9))


def test_a_job_is_tuned(tmp_path: Path) -> None:
    length = open_dataset(resolve(parse_job(JOB))).train_len
    four_steps = {"epochs": 4 * 4 / length, "global_batch": 4, "eval_every": 2, "eval_batches": 1}
    write_job(tmp_path, **JOB | {"train": four_steps})
    command = ("tune", "job.yaml", "--over", "optim.lr=1e-4..1e-1", "--trials", "2", "--factor", "2", "--json")
    done = python(tmp_path, "-m", "weft", *command, "--out", "best.yaml", **WITH_TWIN)
    assert done.code == 0, done.err
    assert len(os.sched_getaffinity(0)) == 1 or "up to 2 trials at a time, 1 ranks each" in done.err
    found = json.loads(done.out)
    assert [t["steps"] for t in found["trials"]] == [4, 2] and found["best"]["losses"].keys() == {"2", "4"}
    written = load_job(str(tmp_path / "best.yaml"))
    assert written.optim.lr == found["best"]["values"]["optim.lr"]
    assert written.name == "job-best", "a finished run of the tuned job would answer that it is already done"
    folder = tmp_path / "runs" / "job-tune"
    best = folder / f"trial-{found['best']['trial']}"
    assert "ready after" in (best / "logs/trial.log").read_text() and "ready after" not in done.err
    assert (folder / "trials.svg").exists() and (folder / "trials.json").exists()
    steps = [json.loads(line)["step"] for line in (best / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]  # the second rung continued the first


def test_speed_is_never_worse_than_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, **JOB)
    times: dict[str, list[float]] = {}

    def measure(job: Any, settings: dict[str, Any]) -> float | None:
        key = json.dumps(settings)
        return (
            times[key].pop(0) if times.get(key) else 1.0 if not settings else 0.5 if "train.microbatch" in key else 2.0
        )

    job = load_job("job.yaml")
    fastest = find_fastest(job, 1, 3, lambda text: None, measure)
    assert fastest.best.settings.keys() == {"train.microbatch"}
    assert fastest.job.train.microbatch == fastest.best.settings["train.microbatch"]
    chosen = json.dumps(fastest.best.settings)
    times = {chosen: [0.5, 3.0]}  # slower when it is measured again
    again = find_fastest(job, 1, 3, lambda text: None, measure)
    assert again.best.settings == {} and again.to_json()["speedup"] == 1.0


def test_wrong_arguments_are_named(tmp_path: Path, in_process: Any) -> None:
    write_job(tmp_path, **JOB)
    for args, text in (
        ((), "needs --over"),
        (("--over", "optim.lrr=1..2"), "optim.lr"),
        (("--over", "optim.lr=-1..2"), "optim.lr"),
        (("--for", "fun"), "loss or speed"),
        (("--over", "optim.lr=1e-3..1", "--sampler", "magic"), "even or bayes"),
        (("--for", "speed", "--over", "optim.lr=1e-3..1"), "--over belongs"),
    ):
        done = in_process(tmp_path, "tune", "job.yaml", *args)
        assert done.code == 2 and text in done.last, (args, done.err)
