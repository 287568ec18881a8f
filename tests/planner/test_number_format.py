"""Numbers that the planner prints."""

from __future__ import annotations

from weft.planner.number_format import human_count, rate


def test_rates_and_counts_have_no_powers_of_ten() -> None:
    assert [rate(value) for value in (0.0123, 9.876, 99.96, 838.2, 1260.0)] == ["0.0123", "9.88", "100", "838", "1,260"]
    assert [human_count(n) for n in (12, 999_700, 70.6e9, 1.5e15)] == ["12", "1,000k", "70.6B", "1,500T"]
