"""Runs that are killed, stopped, moved or damaged resume as the undisturbed run: same losses, same samples."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.command import (
    Output,
    Started,
    ids_by_step,
    losses,
    python,
    run_of,
    step_of,
    strays,
    until,
    weft,
    write_job,
)
from helpers.self_faults import was_executed, write_orders

from weft.job.errors import Exit
from weft.watch.journal import read_jsonl

STEPS = 20
JOB: dict[str, Any] = {
    "name": "run",
    "model": {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 32, "dropout": 0.1, "tied": True},
    "data": {"seq_len": 16, "record_ids": True},
    "train": {"steps": STEPS, "global_batch": 8, "microbatch": 2, "eval_every": 10, "eval_batches": 1, "ema": 0.9},
    "optim": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {"every": 5, "keep": 4},
    "parallel": {"dp_shard": 2, "zero": 2},
    "cluster": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_job(path, **JOB)
    return path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[int, float]:
    """The losses of an undisturbed run under torchrun."""
    run = run_of(folder, "undisturbed")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    started = Started(folder, "train", "job.yaml", "name=undisturbed", under=torchrun)
    until(lambda: step_of(run) >= 1 or started.process.poll() is not None)
    with (run.path / ".lock").open("rb") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert step_of(run) == STEPS, "another run may use the folder"
    result = started.end()
    assert result.code == 0, result.err
    output = losses(run)
    assert list(output) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in output.values())
    return {step: values[0] for step, values in output.items()}


@pytest.fixture(scope="module")
def killed(folder: Path, undisturbed: dict[int, float]) -> tuple[Output, Output]:
    """The same run, first its launcher and then, with nobody to replace it, one of its ranks killed without warning,
    then left to finish."""
    run, chance = run_of(folder, "killed"), random.Random(7)
    moments = chance.randint(6, 9), chance.randint(12, 15)
    train = ("-m", "weft", "train", "job.yaml", "name=killed", "checkpoint.background=false")
    orders = write_orders(folder / "first", {"kind": "launcher SIGKILL", "rank": 0, "step": moments[0]})
    assert python(folder, *train, **orders).code == -signal.SIGKILL
    until(lambda: not strays(["helpers.self_faults", "runs/killed"]))
    assert step_of(run) >= moments[0] - 2
    orders = write_orders(folder / "second", {"kind": "kill", "rank": 1, "step": moments[1]})
    return python(folder, *train, "--no-resilient", **orders), weft(folder, "train", "job.yaml", "name=killed")


def test_a_killed_run_is_bit_identical(
    folder: Path, killed: tuple[Output, Output], undisturbed: dict[int, float]
) -> None:
    """Every record of a step counts, also the repeated ones of a resumed run."""
    _, last = killed
    assert last.code == 0, last.err
    output = losses(run_of(folder, "killed"))
    assert list(output) == list(range(1, STEPS + 1))
    assert {(step, loss) for step, values in output.items() for loss in values} == set(undisturbed.items())
    events = read_jsonl(run_of(folder, "killed").events)
    assert len([e for e in events if e["event"] == "resume"]) == 2
    assert ids_by_step(run_of(folder, "killed")) == ids_by_step(run_of(folder, "undisturbed"))


def test_the_last_lines_name_the_killed_rank(killed: tuple[Output, Output]) -> None:
    result, _ = killed
    assert result.code == Exit.DIFFERS
    assert result.err.splitlines()[-2:] == [
        "rank 1 was killed by SIGKILL; if nobody sent it, memory may have run out: see dmesg, and try a smaller "
        "train.microbatch",
        "log: runs/killed/logs/rank-1.log; start the same command again to resume",
    ]


ALONE = "parallel={dp_shard: 1}"
STAGES: list[tuple[tuple[str, ...], signal.Signals | None, Exit]] = [
    (("parallel={dp_shard: 2, tp: 2, zero: 3}", "train.microbatch=1"), signal.SIGINT, Exit.INTERRUPTED),
    (("parallel={tp: 2}",), signal.SIGTERM, Exit.PREEMPTED),
    ((ALONE,), None, Exit.DONE),
]


def _hurry(started: Started, orders: Path, stop: signal.Signals) -> None:
    """Send a signal again and again after the first, also while a rank exits: it counts once."""
    for rank in started.ranks() if was_executed(orders) else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(stop)


def test_resuming_under_other_layouts_reads_every_sample_once(folder: Path, undisturbed: dict[int, float]) -> None:
    """Stopped by SIGINT and SIGTERM, it resumes at the next step under other layouts and numbers of ranks."""
    run, chance = run_of(folder, "moved"), random.Random(11)
    for stage, (overrides, stop, code) in enumerate(STAGES):
        before = step_of(run)
        alone = ["--no-resilient"] if overrides == (ALONE,) else []
        orders: dict[str, str] = {}
        if stop is not None:
            order = {"kind": f"launcher {stop.name}", "rank": 0, "step": before + chance.randint(2, 6)}
            orders = write_orders(folder / f"moved-{stage}", order)
        started = Started(folder, "train", "job.yaml", "name=moved", *overrides, *alone, **orders)
        if stop is not None:
            started.wait_for_end(lambda: _hurry(started, folder / f"moved-{stage}", stop))  # noqa: B023
        result = started.end()
        assert result.code == code, result.err
        assert "Traceback" not in result.err
        if stage:
            assert f"resumed from step {before}," in result.err
    output = losses(run)
    assert list(output) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in output.values()), "a step was told twice: the stop had not saved it"
    assert {s: values[0] for s, values in output.items()} == pytest.approx(undisturbed, rel=2e-4)
    read = ids_by_step(run)
    assert {step: sorted(ids) for step, ids in read.items()} == {
        step: list(range(8 * (step - 1), 8 * step)) for step in range(1, STEPS + 1)
    }


def test_ctrl_c_during_an_evaluation(folder: Path) -> None:
    run = run_of(folder, "evaluating")
    orders = write_orders(
        folder / "evaluating", {"kind": "launcher SIGINT", "rank": 0, "step": 6, "phase": "evaluation"}
    )
    result = python(folder, "-m", "weft", "train", "job.yaml", "name=evaluating", ALONE, "train.eval_every=5", **orders)
    assert result.code == Exit.INTERRUPTED, result.err
    assert step_of(run) == 5, result.err
    assert "stopped and saved" in result.err


def test_a_finished_run_is_reported(folder: Path, killed: tuple[Output, Output]) -> None:
    run = run_of(folder, "killed")
    before = run.metrics.read_bytes()
    result = weft(folder, "train", "job.yaml", "name=killed", ALONE, "model.dropout=0.2", "optim.lr=0.5")
    assert result.code == 0
    assert "is 0.5 now: it counts from the next step on" in result.err
    assert "model.dropout was 0.1 until here and is 0.2 now: the weights were trained with the former" in result.err
    assert f"already done at step {STEPS}; raise train.steps to continue, or use --fresh to start again" in result.err
    assert run.metrics.read_bytes() == before


def test_damaged_checkpoints_are_skipped(
    folder: Path, killed: tuple[Output, Output], undisturbed: dict[int, float]
) -> None:
    """The newest truncated, the next with one bit flipped, the third without its manifest: the fourth is used."""
    shutil.copytree(run_of(folder, "killed").path, run_of(folder, "damaged").path)
    run = run_of(folder, "damaged")
    *_, fourth, third, second, newest = sorted(run.checkpoints.iterdir())
    truncated = max(newest.glob("*.distcp"), key=lambda p: p.stat().st_size)
    os.truncate(truncated, truncated.stat().st_size // 2)
    flipped = max(second.glob("*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    (third / "manifest.json").unlink()
    result = weft(folder, "train", "job.yaml", "name=damaged", ALONE)
    assert result.code == 0, result.err
    step = int(fourth.name.removeprefix("step-"))
    assert f"resumed from step {step}," in result.err
    for path in (newest, second, third):
        line = next(x for x in result.err.splitlines() if path.name in x and "damaged" in x)
        assert "is damaged and was skipped: " in line
    damaged = [e for e in read_jsonl(run.events) if e["event"] == "damaged"]
    assert {Path(e["path"]).name for e in damaged} >= {newest.name, second.name, third.name}
    before = losses(run_of(folder, "killed"))
    again = {s: values[-1] for s, values in losses(run).items() if len(values) > len(before[s])}
    assert again == pytest.approx({s: undisturbed[s] for s in range(step + 1, STEPS + 1)}, rel=2e-4)


OWN: dict[str, Any] = {"data.source": "pydoc", "train.microbatch": "auto", "train.eval_every": 0}


def own(folder: Path, name: str, model: str, *overrides: str) -> Output:
    settings = [f"{key}={value}" for key, value in OWN.items()]
    return weft(folder, "train", "job.yaml", f"name={name}", f"model=helpers.own_models:{model}", *settings, *overrides)


def test_a_run_restarts_if_all_checkpoints_are_damaged(
    folder: Path, killed: tuple[Output, Output], undisturbed: dict[int, float]
) -> None:
    shutil.copytree(run_of(folder, "killed").path, run_of(folder, "ruined").path)
    run = run_of(folder, "ruined")
    paths = sorted(run.checkpoints.iterdir())
    for path in paths:
        (path / "manifest.json").write_text("{", encoding="utf-8")
    result = weft(folder, "train", "job.yaml", "name=ruined", ALONE, "train.steps=2", "train.eval_every=0")
    assert result.code == 0, result.err
    assert f"all its {len(paths)} checkpoints are damaged: the run starts again from step 0" in result.err
    assert "restart" in [e["event"] for e in read_jsonl(run.events)]
    assert losses(run)[1][-1] == pytest.approx(undisturbed[1], rel=2e-4)
    assert all(path.exists() for path in paths)


def test_a_refused_resume_restores_job_and_plan(folder: Path, killed: tuple[Output, Output]) -> None:
    run = run_of(folder, "killed")
    before = run.job.read_bytes(), run.plan.read_bytes()
    result = weft(folder, "train", "job.yaml", "name=killed", ALONE, "model.dim=32", f"train.steps={STEPS + 1}")
    assert result.code == Exit.JOB, result.err
    assert result.last.startswith("weft: ")
    assert "Traceback" not in result.err
    assert (run.job.read_bytes(), run.plan.read_bytes()) == before


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure(folder: Path) -> None:
    """No file may grow beyond 40 KB, as on a full disk."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); "
        "from weft.cli.main import main; sys.argv[0] = 'weft'; main()"
    )
    job = ("job.yaml", "name=full", ALONE, "train.steps=3", "train.eval_every=0", "model.ffn=2048")
    result = python(folder, "-c", code, "train", *job)
    assert result.code == Exit.MACHINE, result.err
    assert result.last.startswith(
        "weft: step 3 was reached, but its checkpoint could not be written to runs/full/checkpoints: rank 0: "
        "runs/full/checkpoints/step-00000003"
    )
    assert result.last.endswith(
        "/__0_0.distcp: File too large; no file may be larger than 40,000 bytes here; raise the limit with "
        "`ulimit -f unlimited`"
    )
    failed = [e for e in read_jsonl(run_of(folder, "full").events) if e["event"] == "checkpoint_failed"]
    assert "File too large" in failed[-1]["why"]


def test_a_diverged_run_names_the_step(folder: Path) -> None:
    """--fresh keeps an earlier run of that name in another folder."""
    earlier = run_of(folder, "diverged")
    earlier.path.mkdir(parents=True)
    earlier.job.write_text("name: diverged\n", encoding="utf-8")
    result = own(folder, "diverged", "TurnsNaN", ALONE, "--fresh")
    assert result.code == Exit.DIVERGED
    assert "the earlier run is kept in runs/diverged.old-1" in result.err
    assert (folder / "runs/diverged.old-1/job.yaml").read_text(encoding="utf-8") == "name: diverged\n"
    assert result.last.startswith("weft: the loss is nan at step 3; try a lower optim.lr (now 0.003)")
    assert "Traceback" not in result.err
    events = read_jsonl(run_of(folder, "diverged").events)
    assert next(e for e in events if e["event"] == "diverged")["why"] in result.err


def test_a_rank_that_raises_is_named(folder: Path) -> None:
    result = own(folder, "raised", "RaisesOnRankOne")
    assert result.code == Exit.DIFFERS
    cause, where = result.err.splitlines()[-2:]
    assert re.match(r"rank 1 \(dp_shard1\) failed in own_models\.py:\d+ in forward: ", cause)
    assert cause.endswith("ValueError: the third step is too much for me")
    assert where == "traceback: runs/raised/logs/rank-1.log; once it is mended, the same command resumes"
    log = (folder / "runs/raised/logs/rank-1.log").read_text(encoding="utf-8")
    assert "own_models.py" in log
    assert "Traceback" in log
    assert strays(["weft.training.rank", "runs/raised"]) == []


def test_a_wrong_job_leaves_no_run_folder(folder: Path) -> None:
    """Four jobs that are refused before a process starts, and one that only the ranks can refuse."""
    wrong = {
        "train.stps=3": "weft: train.stps: unknown key; did you mean train.steps?",
        "train.global_batch=7": "weft: train.global_batch=7 is not a multiple of the 2 data-parallel ranks; "
        "6 or 8 would work",
        "parallel={tp: 8}": "weft: parallel.tp=8 does not divide model.heads=4; tp=1, 2 or 4 would work",
        "data.source=./nothing": "weft: data.source: no source or path is named './nothing'. It may be pydoc, stdlib, "
        "docstrings, synthetic, movielens, mnist, fashion-mnist, the path of a store made by `weft data build`, or "
        "your own dataset as package.module:name",
    }
    for override, text in wrong.items():
        result = weft(folder, "train", "job.yaml", "name=wrong", override)
        lines = [line for line in result.err.splitlines() if line != "wrong: planning, then starting the ranks"]
        assert (result.code, lines, result.out) == (Exit.JOB, [text], "")
        assert not run_of(folder, "wrong").path.exists()
    result = own(folder, "wrong", "Missing", ALONE)
    assert (result.code, result.err.strip().splitlines()[-1]) == (
        Exit.JOB, "weft: model.module='helpers.own_models:Missing': helpers.own_models has no 'Missing'",
    )  # fmt: skip
    assert not run_of(folder, "wrong").path.exists()
