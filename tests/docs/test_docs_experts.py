"""docs/experts.md: every token in its picture comes home."""

from __future__ import annotations

from helpers.docs_pages import maker


def test_every_use_of_a_token_meets_its_expert() -> None:
    *_, (_, _, grouped) = maker("experts").columns()
    assert all(e // 2 == rank for rank, uses in enumerate(grouped) for _, _, e in uses)
    assert sum(len(uses) for uses in grouped) == 2 * 4 * 2
