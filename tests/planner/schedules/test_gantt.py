"""Gantt charts as text and SVG."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from weft.job import parse_job
from weft.job.errors import JobError
from weft.planner.plan import Plan
from weft.planner.schedules.gantt import gantt_svg, gantt_text
from weft.planner.schedules.known_schedules import SCHEDULES, make_schedule
from weft.planner.schedules.simulate import Costs, Span, Timeline, equal_costs, simulate
from weft.planner.schedules.stage_costs import simulated

SVG = "{http://www.w3.org/2000/svg}"


def line(name: str, ranks: int = 4, microbatches: int = 8) -> Timeline:
    schedule = make_schedule(name, ranks, microbatches)
    return simulate(schedule, equal_costs(schedule.stages))


def test_text_chart_of_1f1b() -> None:
    assert gantt_text(line("1f1b", 2, 3), 40).splitlines() == [
        "rank 0 0░1░····0███2░1███··2███",
        "rank 1 ··0░0███1░1███2░2███····",
        "░ forward   █ backward   · idle",
        "bubble 25.0% of 12",
    ]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("width", [1, 20, 77, 200])
def test_rows_fit_whatever_the_width(name: str, width: int) -> None:
    rows = gantt_text(line(name), width).splitlines()
    assert [r[:7] for r in rows[:4]] == [f"rank {i} " for i in range(4)]
    assert all(len(r) <= max(width, 8 + 7) for r in rows[:4])
    assert len({len(r) for r in rows[:4]}) == 1
    assert "bubble" in rows[-1]


def test_many_microbatches_and_odd_lengths_are_drawn() -> None:
    schedule = make_schedule("1f1b", 2, 70)
    uneven = simulate(schedule, Costs((1e-3, 1.7e-3), (2.2e-3, 3.1e-3), send=1e-4))
    assert "Z" in gantt_text(uneven, 2000).splitlines()[0]
    assert gantt_text(simulate(schedule, Costs((0, 0), (0, 0))), 40).startswith("rank 0")


def test_messages_are_drawn_below_computation() -> None:
    spans = (Span(0, "F", 0, 0, 0, 4), Span(0, "send", 0, 0, 2, 8), Span(0, "recv", 0, 0, 8, 9))
    seen = gantt_text(Timeline(spans, 9, 0.5, (1,), 2, (5,)), 9 + 7)
    assert seen.splitlines()[0] == "rank 0 0░░░→→→→←"
    assert "→ send" in seen and "← receive" in seen


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_svg_is_valid_and_shows_every_action(name: str) -> None:
    made = line(name)
    root = ElementTree.fromstring(gantt_svg(made, "a <b> & c"))
    assert root.findtext(f"{SVG}title") == "a <b> & c"
    result = [t.text or "" for t in root.iter(f"{SVG}title")][1:]
    assert len(result) == len(made.spans)
    assert f"bubble {made.bubble:.1%}" in "".join(root.itertext())
    wide = [(float(r.get("x") or 0), float(r.get("width") or 0)) for r in root.iter(f"{SVG}rect")]
    assert all(x >= 0 and x + w <= 960 for x, w in wide)
    assert ("paler" in "".join(root.itertext())) == (SCHEDULES[name].default_stages > 1)


def test_an_axis_can_be_longer_than_the_line() -> None:
    made = line("1f1b")
    ends = [float(t) for t in ElementTree.fromstring(gantt_svg(made, "x", until=66)).itertext() if t.strip().isdigit()]
    assert 60 in ends
    nothing = replace(made, spans=(), length=0.0, bubble=0.0)
    assert ElementTree.fromstring(gantt_svg(nothing, "x")) is not None


@pytest.mark.parametrize(
    ("ranks", "advice"), [(1, ""), (3, "; parallel.pp=3 would make one"), (8, "; parallel.pp=2 would make one")]
)
def test_a_plan_without_a_pipeline_is_refused_with_a_degree_that_divides_its_ranks(ranks: int, advice: str) -> None:
    plan = Plan(device="cuda", device_name="h100-sxm", backend="nccl", dp_shard=ranks)
    with pytest.raises(JobError) as refused:
        simulated(parse_job({"model": "tiny"}), plan)
    assert str(refused.value) == f"this plan has no pipeline to draw{advice}"
