"""The pipeline figure: both time lines and bubbles, in a real browser too, and none without a file."""

import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.planner.advice.why import TIME_WORDS
from weft.planner.make_plan import make_plan
from weft.planner.schedules.known_schedules import make_schedule
from weft.planner.schedules.simulate import Costs, simulate
from weft.watch.figures.mesh import pipeline_text
from weft.watch.figures.pipeline import pipeline_card
from weft.watch.journal import Journal
from weft.watch.report import write_report


def line(name: str, ranks: int, microbatches: int, send: float, noise: random.Random | None = None) -> dict[str, Any]:
    """A time line in the format of pipeline.json; with noise and messages, like a measured one."""
    schedule = make_schedule(name, ranks, microbatches)
    wide = [0.01 * (1 + (noise.random() * 0.2 if noise else 0)) for _ in range(schedule.stages)]
    output = simulate(schedule, Costs(tuple(wide), tuple(2 * w for w in wide), send=send))
    spans = [[s.rank, s.kind, s.stage, s.microbatch, s.start, s.end] for s in output.spans]
    if noise:
        spans += [[r, "send", s, m, e, e + send] for r, k, s, m, _, e in spans if k == "F" and s < schedule.stages - 1]
        spans += [[r, "recv", s, m, b - send, b] for r, k, s, m, b, _ in spans if k == "F" and s > 0]
    return {"spans": spans, "length": output.length, "bubble": output.bubble}


def recorded(name: str = "1f1b", ranks: int = 4, microbatches: int = 8) -> dict[str, Any]:
    return {
        "schedule": name,
        "simulated": line(name, ranks, microbatches, 0.0),
        "measured": {"step": 1200, **line(name, ranks, microbatches, 0.002, random.Random(0))},
    }


def write(path: Path, raw: dict[str, Any]) -> RunDir:
    run = RunDir(path)
    with Journal(run) as journal:
        journal.event("start", step=0)
        journal.metrics({"step": 1, "loss": 2.0, "step_time_s": 0.1})
    (path / "pipeline.json").write_text(json.dumps(raw), encoding="utf-8")
    return run


def charts(raw: dict[str, Any]) -> list[str]:
    """The text and tooltips of each chart of a card, after its caption."""
    return re.split(r"<svg ", pipeline_card(json.dumps(raw)))


def test_both_time_lines_and_bubbles() -> None:
    raw = recorded()
    caption, simulated, measured = charts(raw)
    bubble = {k: f"{raw[k]['bubble']:.1%}" for k in ("measured", "simulated")}
    assert (
        f"Schedule 1f1b. The ranks waited {bubble['measured']} of the step; "
        f"the simulator expected {bubble['simulated']}." in caption
    )
    assert "<title>simulated</title>" in simulated and f"bubble {bubble['simulated']}, 0.33 s" in simulated
    assert f"bubble {bubble['measured']}, {raw['measured']['length']:.4g} s" in measured
    assert "<title>measured, step 1,200</title>" in measured
    assert simulated.count("<title>forward, ") == measured.count("<title>forward, ") == 32
    assert "<title>send, " in measured and "<title>send, " not in simulated
    ticks = re.compile(r'text-anchor="middle">([^<]+)<')
    assert ticks.findall(simulated) == ticks.findall(measured), "both have one axis"


def test_a_simulation_in_other_units_has_its_own_axis() -> None:
    raw = recorded()
    raw["simulated"] = {**raw["simulated"], "length": 33.0}
    _, simulated, measured = charts(raw)
    assert "33 long" in simulated and "long" not in measured


def test_one_line_alone_is_drawn() -> None:
    raw = recorded()
    for gone, text in [("measured", "no step was recorded."), ("simulated", "The ranks waited")]:
        caption, _ = charts({**raw, gone: None})
        assert text in caption


def test_a_missing_bubble_is_computed() -> None:
    raw = recorded()
    for key in ("bubble", "length"):
        del raw["simulated"][key]
    assert "bubble 27.3%, 0.33 s" in charts(raw)[1]


def test_a_long_step_on_many_ranks_stays_readable() -> None:
    caption, _ = charts({"simulated": line("1f1b", 80, 100, 0.0)})
    assert "The first 64 of 80 ranks are shown." in caption
    assert "12,800 actions, those of its begin, middle and end are drawn." in caption


def test_a_step_of_many_microbatches_is_drawn_in_three_stretches_with_numbers() -> None:
    _, drawn = charts({"simulated": line("1f1b", 4, 128, 0.0)})
    numbers = {int(n) for n in re.findall(r'class="on"[^>]*>(\d+)<', drawn)}
    assert {0, 1, 2} <= numbers and {63, 64} & numbers and max(numbers) < 128
    wide = [float(w) for w in re.findall(r'<g><title>forward[^/]*</title><rect[^>]* width="([\d.]+)"', drawn)]
    assert sum(w > 8 for w in wide) > 0.8 * len(wide) and len(wide) < 128


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"simulated": {"spans": [[0, "F"]]}}',
        '{"simulated": {"spans": [["x", "F", 0, 0, 0, 1]]}}',
        '{"measured": {"spans": [[0, "F", 0, 0, null, 1], [-1, "F", 0, 0, 0, 1], [0, "?", 0, 0, 0, 1]]}}',
        '{"measured": {"spans": 3, "length": "long"}}',
    ],
)
def test_a_broken_file_is_reported_on_the_page(tmp_path: Path, text: str) -> None:
    run = write(tmp_path / "run", {})
    (run.path / "pipeline.json").write_text(text)
    assert "pipeline.json could not be understood." in write_report(run).read_text(encoding="utf-8")


def test_no_file_no_card(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {})
    (run.path / "pipeline.json").unlink()
    assert "The pipeline&#x27;s step" not in write_report(run).read_text(encoding="utf-8")


def test_a_browser_draws_every_bar(tmp_path: Path) -> None:
    page = write_report(write(tmp_path / "run", recorded("dualpipe-v")))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    more = ["--window-size=1400,3000", "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        ["chromium", *flags, *more, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    card = done.stdout[done.stdout.index('id="pipeline"') :].split("</section>")[0]
    raw = recorded("dualpipe-v")
    assert card.count("<g><title>") == len(raw["simulated"]["spans"]) + len(raw["measured"]["spans"])
    assert "measured, step 1,200" in card


def test_a_plan_says_which_wait_makes_its_step_longer() -> None:
    """The mean bubble of unequal stages is not the time of filling and draining in the plan."""
    overrides = [
        "model.layers=5",
        "parallel={pp: 2}",
        "train.global_batch=16",
        "train.microbatch=1",
        "cluster.device=cpu",
    ]
    job, plan = make_plan(load_job("tiny", overrides), 2)
    text = pipeline_text({**plan.to_json(), "job": job.model_dump(mode="json")})
    line = json.loads(text)["simulated"]
    assert line["bubble_of_busiest"] < line["bubble"]
    caption = charts(json.loads(text))[0]
    assert f"idle {line['bubble']:.1%} of this time line (the bubble), and the busiest" in caption
    assert f"{line['bubble_of_busiest']:.1%}. Only the latter" in caption
    assert TIME_WORDS["pp_bubble"] in caption
