"""docs/experts.md: its picture sends every token to the right rank."""

from __future__ import annotations

from helpers.docs_pages import maker


def test_every_token_is_sent_to_its_expert() -> None:
    *_, (_, _, grouped) = maker("experts").columns()
    assert all(e // 2 == rank for rank, lines in enumerate(grouped) for _, uses in lines for _, _, e in uses)
    assert sum(len(uses) for lines in grouped for _, uses in lines) == 2 * 4 * 2
