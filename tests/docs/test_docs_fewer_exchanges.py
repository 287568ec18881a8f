"""docs/fewer-exchanges.md: its picture follows the rules of each mode."""

from __future__ import annotations

from helpers.docs_pages import maker


def test_fast_workers_do_not_wait_for_a_server() -> None:
    drawn = maker("sync")
    together, _ = drawn.every_step([1, 1, 3])
    apart, delivered, updates = drawn.server([1, 1, 3], 4)
    assert len(together[0]) == 8 and len(apart[0]) == 24
    assert len(updates) * 3 <= len(delivered)
