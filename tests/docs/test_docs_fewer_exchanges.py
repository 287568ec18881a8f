"""docs/fewer-exchanges.md: its picture tells the truth about waiting."""

from __future__ import annotations

from helpers.docs_pages import maker


def test_a_server_lets_the_fast_go_on() -> None:
    drawn = maker("sync")
    together, _ = drawn.every_step([1, 1, 3])
    apart, delivered, updates = drawn.server([1, 1, 3], 4)
    assert len(together[0]) == 8 and len(apart[0]) == 24
    assert len(updates) * 3 <= len(delivered)
