"""Unit tests of the detectors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from weft.guards.checksum import Checksums
from weft.guards.loss_spikes import SpikeDetector
from weft.guards.majority import Outliers, find_outliers
from weft.guards.out_of_memory import explain, is_oom, smaller
from weft.guards.silent_corruption import COMPARE_DELAY_STEPS, period
from weft.guards.slow_links import SlowLinkDetector, shortest_wait
from weft.guards.step_report import FigureLayout, RankFigures
from weft.planner.plan import Plan


def falling(step: int, noise: float, draw: random.Random) -> tuple[float, float]:
    """Loss and norm of a simulated step."""
    loss = 1.5 + 4 * math.exp(-step / 40) + draw.gauss(0, noise)
    return max(loss, 0.01), math.exp(draw.gauss(0, 0.4))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.floats(0, 0.25))
def test_noise_is_no_spike(seed: int, noise: float) -> None:
    draw, spikes = random.Random(seed), SpikeDetector()
    assert all(spikes.detect(s, *falling(s, noise, draw)) is None for s in range(1, 200))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.floats(0.001, 0.1), at=st.integers(40, 150), late=st.booleans())
@example(seed=109545, noise=0.0625, at=40, late=False)  # the norm before is unusual, too
def test_poisoned_batch_is_found_within_three_steps(seed: int, noise: float, at: int, late: bool) -> None:
    """The loss of the bad step is an outlier, or only its gradient norm and the loss of the next step."""
    draw, spikes = random.Random(seed), SpikeDetector()
    found = None
    for step in range(1, at + 4):
        loss, norm = falling(step, noise, draw)
        if step == at:
            loss, norm = (loss, norm * 25) if late else (loss + 4, norm * 10)
            assume(not late or norm > 15)  # a smaller one is within the noise, and the next step is blamed
        elif step > at:
            loss += 4
        found = spikes.detect(step, loss, norm)
        if found:
            break
    assert found is not None
    assert step <= at + 1
    assert found.step == at


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_bad_batch_of_untrained_model_is_found_by_loss_and_norm(seed: int) -> None:
    draw, spikes = random.Random(seed), SpikeDetector()
    for step in range(1, 60):
        assert spikes.detect(step, 4.9 + draw.gauss(0, 0.03), math.exp(draw.gauss(0.4, 0.1))) is None
    found = spikes.detect(60, 5.6, 12.0)
    assert found is not None
    assert found.step == 60


def test_repeated_spike_undoes_more_and_new_level_is_accepted() -> None:
    draw, spikes = random.Random(3), SpikeDetector()
    for step in range(1, 60):
        assert spikes.detect(step, *falling(step, 0.02, draw)) is None
    assert spikes.detect(60, 9.0, 1.0).step == 60  # type: ignore[union-attr]
    assert spikes.detect(61, 9.0, 1.0).step == 59  # type: ignore[union-attr]
    assert spikes.detect(60, 9.0, 1.0).step == 58  # type: ignore[union-attr]
    assert all(spikes.detect(step, 9.0 + 0.01 * (step % 3), 1.0) is None for step in range(59, 120))


def test_slow_link_is_reported_once() -> None:
    links, key = SlowLinkDetector(), ("dp_shard", (0, 1))
    other = ("tp", (0, 2))
    for i in range(40):
        assert links.add(0.1, {key: 0.010 + 0.001 * (i % 3), other: 0.002}) == []
    output = [(i, found) for i in range(30) for found in links.add(0.13, {key: 0.045, other: 0.002})]
    [(when, found)] = output
    assert when < 20
    assert (found.axis, found.ranks) == key
    assert found.now_s > 4 * found.usual_s * 0.8
    calm = SlowLinkDetector()
    for i in range(200):
        assert calm.add(0.1, {key: 0.001 * (1 + i % 4)}) == []


def test_waits_for_a_core_are_not_those_for_a_link() -> None:
    calm = RankFigures(0.1, 0.0, 0.0, 0, 0.001, 0.2, 0.1, 0.0, 1.0, (0.12, 0.3), ())
    starved = RankFigures(0.1, 0.0, 0.0, 0, 0.11, 0.01, 0.1, 0.0, 1.0, (0.13, 0.3), ())
    assert shortest_wait([calm, calm], 0) == pytest.approx(0.12)
    assert shortest_wait([calm, starved], 0) == pytest.approx(0.02)


groups = st.lists(st.integers(2, 4), min_size=1, max_size=3)


@given(sizes=groups, data=st.data())
def test_minority_is_named_and_tie_is_not_decided(sizes: list[int], data: st.DataObject) -> None:
    ranks = iter(range(100))
    made = [tuple(next(ranks) for _ in range(size)) for size in sizes]
    group = data.draw(st.sampled_from(made))
    outliers = data.draw(st.sampled_from(group))
    digests = {r: (1.0, 2.0) for g in made for r in g}
    assert find_outliers(made, digests, set()) == []
    digests[outliers] = (1.0, 3.0)
    [found] = find_outliers(made, digests, set())
    if len(group) == 2:
        assert found == Outliers(group, (), None)
        [found] = find_outliers(made, digests, {outliers})  # unless it saw itself that its weights changed
    assert (found.group, found.ranks) == (group, (outliers,))
    assert found.source in group
    assert found.source != outliers


@settings(deadline=None)
@given(size=st.integers(1, 40), bit=st.integers(0, 31), data=st.data())
def test_flipped_bit_changes_one_checksum(size: int, bit: int, data: st.DataObject) -> None:
    master_params = {"a": torch.randn(size), "b": torch.randn(3, 5), "half": torch.randn(7).bfloat16()}
    digests = Checksums(master_params)
    before, whole = digests.each(), digests.by_kind(digests.each())
    place = data.draw(st.integers(0, size - 1))
    flip = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    master_params["a"].view(torch.int32)[place] ^= flip
    assert (digests.each() != before).tolist() == [True, False, False]
    assert not torch.equal(digests.by_kind(digests.each()), whole)
    master_params["a"].view(torch.int32)[place] ^= flip
    assert torch.equal(digests.by_kind(digests.each()), whole)


@given(world=st.integers(1, 5), axes=st.integers(0, 3), digests=st.integers(0, 2), data=st.data())
def test_figures_round_trip(world: int, axes: int, digests: int, data: st.DataObject) -> None:
    table = FigureLayout(world, tuple(f"axis{i}" for i in range(axes)), 2 * digests)
    number = st.floats(0, 1e6)
    rows = [
        RankFigures(*(data.draw(number) for _ in range(3)), data.draw(st.integers(0, 9)),
            *(data.draw(number) for _ in range(5)), tuple(data.draw(number) for _ in range(axes)),
            tuple(float(2**32 - 1 - r) for _ in range(2 * digests)))
        for r in range(world)
    ]  # fmt: skip
    total = torch.zeros(2 + world * table.width, dtype=torch.float64)
    for rank, row in enumerate(rows):
        message = table.message(rank, [0.5, 1.0], row, torch.device("cpu"))
        message[table.place(rank, 2)] = torch.tensor(row.digests, dtype=torch.float64)
        total += message
    assert total[:2].tolist() == [0.5 * world, 1.0 * world]
    assert table.rows(total[2:].tolist()) == rows


def test_out_of_memory_is_recognised_and_halves_the_microbatch() -> None:
    assert is_oom(MemoryError())
    assert is_oom(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_oom(caught.value)
    assert not is_oom(RuntimeError("shapes differ"))
    predicted = {"states_gib": 1.0, "activations_gib": 3.0, "gathered_gib": 0.0}
    plan = Plan("cpu", "cpu", "gloo", microbatch=6, accumulation=2, predicted=predicted)
    less = smaller(plan)
    assert less is not None
    assert (less.microbatch, less.accumulation) == (3, 4)
    output = explain(caught.value, plan)
    assert "the plan counts activations and logits 3.00 GiB, weights, gradients and optimizer 1.00 GiB" in output
    assert output.endswith("train.microbatch=3 takes less")
    least = smaller(less)
    assert least is not None
    assert (least.microbatch, least.accumulation) == (1, 12)
    assert smaller(least) is None


@given(every=st.integers(2, 100), spacing=st.integers(1, 30))
def test_weight_comparison_period(every: int, spacing: int) -> None:
    assert period(every, spacing) + COMPARE_DELAY_STEPS <= every
    assert spacing > every - COMPARE_DELAY_STEPS or period(every, spacing) % spacing == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_classifier_with_almost_no_loss_has_no_spikes(seed: int) -> None:
    """One digit of a batch that is hard multiplies the loss and the norm; NaN-like losses are still undone."""
    draw, spikes = random.Random(seed), SpikeDetector()
    for step in range(1, 400):
        usual = max(0.003, 2.3 * math.exp(-step / 15))
        hard = 0.03 * draw.random() if draw.random() < 0.1 else 0.0
        loss = usual * math.exp(draw.gauss(0, 0.4)) + hard
        assert spikes.detect(step, loss, loss**0.8 * math.exp(draw.gauss(0, 0.5))) is None
    assert spikes.detect(400, 1.5, 3.0).step == 400  # type: ignore[union-attr]
    again = SpikeDetector()
    for _ in range(8):
        again.begin(2.3, 1.0)
    for _ in range(60):
        again.learn(0.003 * math.exp(draw.gauss(0, 0.3)), 0.01 * math.exp(draw.gauss(0, 0.3)))
    assert again.detect(61, 0.05, 0.6) is None
