"""The pipeline simulator, and optimal splits into stages."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.job.errors import JobError
from weft.planner.schedules.actions import messages
from weft.planner.schedules.known_schedules import make_schedule
from weft.planner.schedules.simulate import Costs, equal_costs, simulate
from weft.planner.schedules.stage_split import split_layers, split_stages


def test_times_of_a_small_example() -> None:
    # two stages, one of them slower, and messages that take 0.5
    line = simulate(make_schedule("1f1b", 2, 2), Costs(forward=(1, 2), backward=(3, 4), send=0.5))
    output = {(s.kind, s.stage, s.microbatch): (s.start, s.end) for s in line.spans}
    assert output == {
        ("F", 0, 0): (0, 1),
        ("F", 0, 1): (1, 2),
        ("F", 1, 0): (1.5, 3.5),
        ("B", 1, 0): (3.5, 7.5),
        ("F", 1, 1): (7.5, 9.5),
        ("B", 1, 1): (9.5, 13.5),
        ("B", 0, 0): (8, 11),
        ("B", 0, 1): (14, 17),
    }
    assert line.length == 17
    assert line.idle == (9, 5)
    assert line.bubble == pytest.approx(14 / 34)
    assert line.in_flight == (2, 1)
    assert line.messages == 4


def test_the_halves_of_a_backward_take_their_share() -> None:
    line = simulate(make_schedule("zb-h1", 2, 3), Costs((1, 1), (4, 4), input_share=0.25))
    taken = {(s.kind, s.stage): s.end - s.start for s in line.spans}
    assert taken == {("F", 0): 1, ("F", 1): 1, ("B", 0): 4, ("I", 1): 1, ("W", 1): 3}


def test_messages_go_only_between_ranks() -> None:
    for name, ranks, count in [("gpipe", 4, 48), ("gpipe", 1, 0), ("interleaved-1f1b", 4, 112), ("zbv", 4, 96)]:
        schedule = make_schedule(name, ranks, 8)
        assert simulate(schedule, equal_costs(schedule.stages)).messages == count
    # the turn of the V stays on its rank; the others go to a neighbour
    sent = messages(make_schedule("zbv", 3, 2))
    assert sorted(sent) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert sorted(sent[0, 1]) == [("F", 0, 0), ("F", 0, 1), ("I", 5, 0), ("I", 5, 1)]
    assert sorted(messages(make_schedule("interleaved-1f1b", 3, 3))) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="gpipe has 2 stages, but costs of 3 forwards and 3 backwards"):
        simulate(make_schedule("gpipe", 2, 2), equal_costs(3))


def test_zero_costs() -> None:
    line = simulate(make_schedule("1f1b", 2, 2), Costs((0, 0), (0, 0)))
    assert (line.length, line.bubble) == (0, 0)


def loads(costs: Sequence[float], split: Sequence[tuple[int, int]]) -> list[float]:
    return [sum(costs[a:b]) for a, b in split]


def every_split(parts: int, stages: int) -> list[list[tuple[int, int]]]:
    cuts = itertools.combinations(range(1, parts), stages - 1)
    return [list(itertools.pairwise((0, *c, parts))) for c in cuts]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
@settings(max_examples=150, deadline=None)
def test_no_other_split_has_a_smaller_largest_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    split = split_stages(costs, stages)
    assert [a for a, _ in split] == [0, *(b for _, b in split[:-1])]
    assert split[-1][1] == len(costs) and len(split) == stages
    assert all(a < b for a, b in split)
    # the largest stage first, then how uneven they are
    best = min((max(x), sum(n * n for n in x)) for s in every_split(len(costs), stages) if (x := loads(costs, s)))
    found = loads(costs, split)
    assert (max(found), sum(n * n for n in found)) == best


def test_equal_blocks_are_split_evenly_and_lighter_first() -> None:
    sizes = [b - a for a, b in split_stages([0.1] * 10, 4)]
    assert sizes == [2, 2, 3, 3]


def test_a_heavy_head_takes_blocks_from_the_last_stage() -> None:
    split = split_stages([0.5, *[1.0] * 9, 3.5], 3)
    assert loads([0.5, *[1.0] * 9, 3.5], split) == [4.5, 4, 4.5]
    assert split == [(0, 5), (5, 9), (9, 11)]


def test_a_deep_model_is_split_quickly() -> None:
    split = split_stages([3.0, *[1.0] * 1000, 7.0], 64)
    assert max(loads([3.0, *[1.0] * 1000, 7.0], split)) == 16


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_must_be_finite_and_not_negative(cost: float) -> None:
    with pytest.raises(ValueError, match="a part's cost must be a number from 0 up"):
        split_stages([1.0, cost, 1.0], 2)


def test_more_stages_than_parts_are_refused() -> None:
    with pytest.raises(JobError, match=r"2 blocks, an embedding and a head cannot be cut into 5 stages .* up to 4"):
        split_stages([1.0] * 4, 5)


@pytest.mark.parametrize(
    ("pinned", "split"),
    [
        ([2, 4], [(0, 3), (3, 8)]),
        ([0, 6], [(0, 1), (1, 8)]),
        ([6, 0], [(0, 7), (7, 8)]),
        ([1, 4, 1], [(0, 2), (2, 6), (6, 8)]),
        ([6], [(0, 8)]),
    ],
)
def test_a_pinned_split_counts_blocks(pinned: list[int], split: list[tuple[int, int]]) -> None:
    assert split_stages([1.0] * 8, len(pinned), pinned) == split


@pytest.mark.parametrize(
    ("pinned", "result"),
    [
        ([2, 3], r"parallel.split=\[2, 3\] adds up to 5 blocks, but model.layers=6; 1 more would work"),
        ([4, 4], r"adds up to 8 blocks, but model.layers=6; 2 fewer would work"),
        ([2, 2, 2], r"names 3 stages, but parallel.pp × parallel.virtual_stages makes 2; give 2 numbers"),
        ([], r"names 0 stages"),
        ([7, -1], r"has a stage of -1 blocks"),
    ],
)
def test_invalid_pinned_splits(pinned: list[int], result: str) -> None:
    with pytest.raises(JobError, match=result):
        split_stages([1.0] * 8, 2, pinned)


@pytest.mark.parametrize(
    ("layers", "stages", "pairs", "split"),
    [
        (6, 2, True, [(0, 2), (2, 6)]),
        (5, 2, True, [(0, 2), (2, 5)]),
        (5, 3, True, [(0, 2), (2, 4), (4, 5)]),
        (6, 2, False, [(0, 3), (3, 6)]),
        (2, 2, False, [(0, 1), (1, 2)]),
    ],
)
def test_layers_alone_fill_every_stage(layers: int, stages: int, pairs: bool, split: list[tuple[int, int]]) -> None:
    assert split_layers([1.0] * layers, stages, pairs=pairs) == split
    assert split_layers([1.0] * layers, stages, [b - a for a, b in split], pairs=pairs) == split


@pytest.mark.parametrize(
    ("stages", "pinned", "result"),
    [
        (2, [3, 3], r"parallel.split=\[3, 3\] cuts between layers 2 and 3, a pair that parallel.tp cuts by column and"),
        (2, [6, 0], r"parallel.split=\[6, 0\] leaves stage 1 with nothing to do; every stage needs a layer"),
        (2, [2, 2], r"adds up to 4 blocks, but model.layers=6; 2 more would work"),
        (4, None, r"model.layers=6, cut in pairs by parallel.tp, cannot be cut into 4 stages .* up to 3 would work"),
    ],
)
def test_invalid_splits_of_layers(stages: int, pinned: list[int] | None, result: str) -> None:
    with pytest.raises(JobError, match=result):
        split_layers([1.0] * 6, stages, pinned, pairs=True)


def test_a_pinned_middle_stage_needs_a_block() -> None:
    with pytest.raises(JobError, match="leaves stage 1 with nothing to do"):
        split_stages([1.0] * 8, 3, [3, 0, 3])
