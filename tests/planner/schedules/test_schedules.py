"""Schedules are valid, and have the bubble and memory of their papers."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.job.errors import JobError
from weft.planner.schedules.actions import Action, Schedule, validate
from weft.planner.schedules.known_schedules import SCHEDULES, check_schedule, make_schedule
from weft.planner.schedules.simulate import Costs, Timeline, equal_costs, simulate

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 16)
SPLIT_BACKWARD = ("zero-bubble", "zb-h1", "zbv", "dualpipe-v")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    allowed = SCHEDULES[name].allowed_stages or (1, 2, 3, 4)
    return make_schedule(name, draw(RANKS), draw(MICROBATCHES), draw(st.sampled_from([None, *allowed])))


def timed(name: str, ranks: int, microbatches: int, virtual: int | None = None) -> Timeline:
    schedule = make_schedule(name, ranks, microbatches, virtual)
    return simulate(schedule, equal_costs(schedule.stages))


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_valid(schedule: Schedule) -> None:
    validate(schedule)
    p, m = schedule.ranks, schedule.microbatches
    done = [a for actions in schedule.actions for a in actions]
    assert len(set(done)) == len(done)
    assert sum(a.kind == "F" for a in done) == schedule.stages * m
    assert sum({"B": 2, "I": 1, "W": 1}.get(a.kind, 0) for a in done) == 2 * schedule.stages * m
    if schedule.name not in SPLIT_BACKWARD:
        assert {a.kind for a in done} == {"F", "B"}
    for rank in range(p):
        assert {a.stage for a in schedule.actions[rank]} == set(schedule.stages_of(rank))
        assert len(schedule.stages_of(rank)) == schedule.stages // p


@given(schedules(), st.data())
@settings(max_examples=60, deadline=None)
def test_uneven_stages_and_slow_messages_cause_no_deadlock(schedule: Schedule, data: st.DataObject) -> None:
    times = st.lists(st.floats(0.1, 9), min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    costs = Costs(data.draw(times), data.draw(times), data.draw(st.floats(0.1, 0.9)), data.draw(st.floats(0, 5)))
    line = simulate(schedule, costs)
    work = schedule.microbatches * (sum(costs.forward) + sum(costs.backward))
    assert sum(s.end - s.start for s in line.spans) == pytest.approx(work)
    assert line.length >= work / schedule.ranks - 1e-6
    assert line.bubble == pytest.approx(1 - work / (schedule.ranks * line.length))
    assert sum(line.idle) == pytest.approx(line.bubble * schedule.ranks * line.length, abs=1e-6)
    for a, b in pairwise(line.spans):
        assert a.rank != b.rank or a.end <= b.start + 1e-9


@given(RANKS, MICROBATCHES)
@settings(max_examples=60, deadline=None)
def test_gpipe_and_1f1b_have_the_same_bubble_but_not_memory(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert timed(name, p, m).bubble == pytest.approx(float(Fraction(p - 1, m + p - 1)))
    assert timed("gpipe", p, m).in_flight == (m,) * p
    assert timed("1f1b", p, m).in_flight == tuple(min(p - r, m) for r in range(p))


@given(RANKS, MICROBATCHES, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p: int, m: int, v: int) -> None:
    line = timed("interleaved-1f1b", p, m, v)
    if m >= p:
        assert line.bubble == pytest.approx(float(Fraction(p - 1, v * m + p - 1)))
    # of stages that are v times smaller
    assert line.length <= v * timed("1f1b", p, m).length
    assert max(line.in_flight) <= v * timed("gpipe", p, m).in_flight[0]


def test_interleaving_in_groups_of_p_is_the_order_of_the_paper() -> None:
    first = make_schedule("interleaved-1f1b", 2, 4).actions[0]
    result = " ".join(f"{a.kind}{a.stage}.{a.microbatch}" for a in first)
    assert result == "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"


@given(RANKS, MICROBATCHES, st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_naive_never_overlaps(p: int, m: int, v: int) -> None:
    line = timed("naive", p, m, v)
    assert line.length == 3 * p * v * m
    in_time = sorted(line.spans, key=lambda s: s.start)
    assert all(a.end <= b.start for a, b in pairwise(in_time))
    assert line.in_flight == (v,) * p


@given(RANKS, MICROBATCHES)
@settings(max_examples=60, deadline=None)
def test_zb_h1_has_a_third_of_the_bubble_and_the_memory_of_1f1b(p: int, m: int) -> None:
    line = timed("zb-h1", p, m)
    if m >= p:
        # Qi et al.: (p-1)(F + I - W), against (p-1)(F + I + W) of 1F1B
        assert line.length == 3 * m + (p - 1)
        assert line.idle == (p - 1,) * p
    assert line.length < timed("1f1b", p, m).length or p == 1
    assert max(line.in_flight) <= min(p, m)
    assert timed("zero-bubble", p, m) == line


@given(RANKS, MICROBATCHES)
@settings(max_examples=60, deadline=None)
def test_v_schedules_have_the_smallest_bubble(p: int, m: int) -> None:
    # both have stages of half the size
    whole, h1 = 2 * timed("1f1b", p, m).length, 2 * timed("zb-h1", p, m).length
    zbv, dual = timed("zbv", p, m), timed("dualpipe-v", p, m)
    for line in (zbv, dual):
        assert line.length < whole or p == 1
        assert line.length >= 6 * m + p - 1
    assert zbv.length <= h1
    assert max(zbv.in_flight) <= 2 * p
    assert max(dual.in_flight) <= 2 * p + 1
    if m >= 2 * p:
        assert dual.length == 6 * m + p - 1
        assert zbv.length <= 6 * m + p
    assert timed("zero-bubble", p, m, 2) == zbv


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 16), (8, 8), (3, 5), (2, 4), (6, 12)])
def test_zbv_reaches_the_lower_bound(p: int, m: int) -> None:
    assert timed("zbv", p, m).length == 6 * m + p - 1


def test_a_long_schedule_is_made_in_reasonable_time_and_near_the_bound() -> None:
    line = timed("zbv", 16, 64)
    assert line.length <= (6 * 64 + 15) * 1.01


def test_placement_of_stages() -> None:
    assert make_schedule("interleaved-1f1b", 3, 4).rank_of == (0, 1, 2, 0, 1, 2)
    for name in ("zbv", "dualpipe-v"):
        schedule = make_schedule(name, 3, 6)
        assert schedule.rank_of == (0, 1, 2, 2, 1, 0)
        assert schedule.stages_of(1) == (1, 4)
    assert make_schedule("1f1b", 3, 1).stages_of(2) == (2,)


def test_dualpipe_pairs_a_forward_one_way_with_a_backward_the_other() -> None:
    p, m = 4, 16
    for rank, actions in enumerate(make_schedule("dualpipe-v", p, m).actions):
        down, up = rank, 2 * p - 1 - rank
        backward = ("B", "I")
        pairs = [(a.stage, b.stage) for a, b in pairwise(actions) if a.kind == "F" and b.kind in backward]
        assert len(pairs) > m
        assert set(pairs) <= {(down, up), (up, down), (up, up)}
        assert pairs.count((up, up)) <= p


def test_the_first_stage_does_not_split_its_backward() -> None:
    assert {a.kind for a in make_schedule("zb-h1", 4, 8).actions[0]} == {"F", "B"}
    assert {a.kind for a in make_schedule("zb-h1", 4, 8).actions[1]} == {"F", "I", "W"}


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "virtual", "result"),
    [
        ("1F1B", 2, 4, None, "parallel.schedule=1F1B is not a pipeline schedule; did you mean 1f1b?"),
        (
            "zero-buble",
            2,
            4,
            None,
            "zero-buble is not a pipeline schedule; did you mean zero-bubble?",
        ),
        ("", 2, 4, None, "one of 1f1b, interleaved-1f1b, zb-h1"),
        ("gpipe", 0, 4, None, "parallel.pp=0 must be at least 1; pp=1 would work"),
        ("gpipe", 2, 0, None, "parallel.microbatches=0 must be at least 1; microbatches=1 would work"),
        ("zbv", 2, 4, 0, "parallel.virtual_stages=0 must be at least 1; virtual_stages=2 would work"),
        (
            "1f1b",
            2,
            4,
            2,
            "parallel.schedule=1f1b supports one stage per rank, not parallel.virtual_stages=2; virtual_stages=1 would "
            "work, or schedule=interleaved-1f1b",
        ),
        ("zb-h1", 2, 4, 2, "virtual_stages=1 would work, or schedule=zbv"),
        (
            "dualpipe-v",
            2,
            4,
            1,
            "parallel.schedule=dualpipe-v supports two stages per rank, not parallel.virtual_stages=1; "
            "virtual_stages=2 would work, or schedule=zb-h1",
        ),
        (
            "zero-bubble",
            2,
            4,
            3,
            "supports one stage or two stages per rank, not parallel.virtual_stages=3; virt",
        ),
    ],
)
def test_refusals(name: str, ranks: int, microbatches: int, virtual: int | None, result: str) -> None:
    text = check_schedule(name, ranks, microbatches, virtual)
    assert text is not None and result in text
    with pytest.raises(JobError, match="parallel"):
        make_schedule(name, ranks, microbatches, virtual)


def swapped(schedule: Schedule, rank: int, i: int, j: int) -> Schedule:
    own = list(schedule.actions[rank])
    own[i], own[j] = own[j], own[i]
    return with_list(schedule, rank, own)


def with_list(schedule: Schedule, rank: int, own: list[Action]) -> Schedule:
    lists = [*schedule.actions]
    lists[rank] = tuple(own)
    return replace(schedule, actions=tuple(lists))


def test_invalid_schedules_are_found() -> None:
    good = make_schedule("1f1b", 2, 2)
    first, last = [list(a) for a in good.actions]
    split = make_schedule("zb-h1", 2, 2)
    late = [a.kind for a in split.actions[1]].index("W")
    early = split.actions[1].index(split.actions[1][late]._replace(kind="I"))
    for broken, result in [
        (with_list(good, 0, first[:-1]), "I of stage 0, microbatch 1 is missing"),
        (with_list(good, 0, [*first, first[0]]), "F of stage 0, microbatch 0 is there 2 times"),
        (with_list(good, 0, [*first, Action("W", 0, 0)]), "W of stage 0, microbatch 0 is there 2 times"),
        (with_list(good, 0, [*first, Action("X", 0, 0)]), "unknown kind 'X'"),
        (with_list(good, 0, [*first, Action("F", 0, 2)]), "F of stage 0, microbatch 2, which does not exist"),
        (with_list(good, 1, [*last, first[0]]), "that stage is on rank 0"),
        (swapped(good, 1, 0, 1), "before the F of stage 1, microbatch 0 that it needs"),
        (swapped(split, 1, early, late), "before the I of stage 1, microbatch 0 that it needs"),
        (replace(good, rank_of=(0, 0)), "stages are placed on ranks"),
        (replace(good, stages=3), "3 stages on 2 ranks, but 2 stages are placed"),
    ]:
        with pytest.raises(ValueError, match=result):
            validate(broken)


def test_a_deadlock_is_found_and_named() -> None:
    # the first rank wants the second microbatch's gradient first; the last needs the first one back before it goes on
    good = make_schedule("gpipe", 2, 2)
    first = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    stuck = with_list(good, 0, first)
    with pytest.raises(ValueError, match=r"deadlock: rank 0 waits in B of stage 0, microbatch 0; rank 1"):
        validate(stuck)
    with pytest.raises(ValueError, match="deadlock"):
        simulate(stuck, equal_costs(2))
