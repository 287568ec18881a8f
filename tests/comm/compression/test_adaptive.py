"""Adaptive compression: the level chosen on each link, without oscillation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.compression.adaptive import (
    CHECKS_AFTER_SLOWDOWN,
    CHECKS_BEFORE_LOWERING,
    LEVELS,
    AdaptiveChoice,
    Figures,
    exposed_seconds,
    lowest_levels,
    seconds_by_level,
    sent_bytes,
)

SIZES = [6_000_000] * 4
MBIT = 1e6 / 8
FIGURES = Figures(0.0005, 1e4 * MBIT, 1.0, (0.3, 0.5, 0.7, 0.9), (0.0, 4e-9, 8e-9, 1e-8, 2e-8))
"""Four buckets of 24 MB that a backward pass makes ready one after the other; 10 Gb/s hides them."""


def choice() -> AdaptiveChoice:
    return AdaptiveChoice(list(SIZES), ranks=2, scattered=False)


def test_no_compression_on_a_fast_link() -> None:
    one = choice()
    assert one.look(FIGURES) is None and one.levels == [0] * 4 and one.describe() == "none × 4"


def test_slower_links_get_more_compression() -> None:
    highest = []
    for mbit in (10_000, 2_000, 1_000, 300, 100, 30):
        one = choice()
        why = one.look(replace(FIGURES, bytes_per_s=mbit * MBIT))
        highest.append(sum(one.levels))
        if why is not None:
            assert f"at {mbit} Mb/s" in why and "hold up a step of 1.00 s" in why
    assert highest == sorted(highest) and highest[0] == 0 and highest[-1] == 4 * (len(LEVELS) - 1)
    assert len(set(highest)) >= 4


def test_int8_before_the_first_step_if_faster() -> None:
    unknown = replace(FIGURES, step_s=0.0, ready_s=(0.0,) * 4)
    slow_to_encode = replace(unknown, code_s=(0.0, *[1e-6] * (len(LEVELS) - 1)))
    assert choice().begin(slow_to_encode) is None
    one = choice()
    why = one.begin(replace(unknown, bytes_per_s=100 * MBIT))
    assert why is not None and "at 100 Mb/s" in why and "is not known yet" in why and one.describe() == "int8 × 4"


def test_no_level_that_does_not_pay() -> None:
    """If encoding takes longer than sending, nothing is compressed, however much is exposed."""
    slow = replace(FIGURES, bytes_per_s=1000 * MBIT, code_s=(0.0, *[1e-6] * (len(LEVELS) - 1)))
    one = choice()
    assert one.look(slow) is None and one.levels == [0] * 4


def test_levels_rise_at_once_and_fall_slowly() -> None:
    one = choice()
    assert one.look(replace(FIGURES, bytes_per_s=100 * MBIT)) is not None
    high = list(one.levels)
    for _ in range(CHECKS_BEFORE_LOWERING - 1):
        assert one.look(FIGURES) is None and one.levels == high
    assert one.look(FIGURES) is not None and one.levels == [0] * 4


def test_unsteady_links_do_not_cause_oscillation() -> None:
    one = choice()
    one.look(replace(FIGURES, bytes_per_s=400 * MBIT))
    high, changes = list(one.levels), 0
    for i in range(20):
        changes += one.look(replace(FIGURES, bytes_per_s=(400 if i % 2 else 2000) * MBIT)) is not None
    assert changes == 0 and one.levels == high


def test_slower_levels_are_reverted_and_avoided() -> None:
    one, slow = choice(), replace(FIGURES, bytes_per_s=300 * MBIT)
    assert one.look(slow) is not None and any(one.levels)
    why = one.look(replace(slow, step_s=1.2))
    assert why == "a step took 1.00 s with less compression and 1.20 s since" and one.levels == [0] * 4
    looks = 0
    while one.look(slow) is None:
        looks += 1
    assert looks == CHECKS_AFTER_SLOWDOWN - 1 and any(one.levels)
    assert one.look(replace(slow, step_s=0.9)) is None and any(one.levels)  # sooner: it stays


def test_bytes_of_both_halves() -> None:
    n = 25_600
    assert sent_bytes("none", n, 4, scattered=False) == 2 * 3 / 4 * 4 * n
    assert sent_bytes("int8", n, 4, scattered=False) == 2 * 3 / 4 * (n + 4 * n / 256)
    assert sent_bytes("int8", n, 4, scattered=True) == 3 / 4 * (n + 4 * n / 256)
    assert sent_bytes("topk:0.04", n, 4, scattered=False) == 3 * 6 * 1024


@given(
    sizes=st.lists(st.integers(1000, 10_000_000), min_size=1, max_size=6), mbit=st.floats(1, 1e5),
    gap=st.floats(0.0, 1.0), ranks=st.integers(2, 8), scattered=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_lowest_levels_are_sufficient_and_minimal(
    sizes: list[int], mbit: float, gap: float, ranks: int, scattered: bool
) -> None:
    ready = [gap * (i + 1) / len(sizes) for i in range(len(sizes))]
    figures = replace(FIGURES, bytes_per_s=mbit * MBIT, ready_s=tuple(ready))
    table = seconds_by_level(figures, sizes, ranks, scattered)
    levels = lowest_levels(ready, table, 0.05)
    out = exposed_seconds(ready, [row[r] for row, r in zip(table, levels, strict=True)])
    best = exposed_seconds(ready, [min(row) for row in table])
    assert best <= out + 1e-12
    if out > 0.05:  # then every bucket is where nothing more would pay
        assert all(min(row[r:]) > 0.9 * row[r] - 1e-12 for row, r in zip(table, levels, strict=True))
    elif any(levels):
        assert exposed_seconds(ready, [row[0] for row in table]) > 0.05
