"""docs/communication.md says what the ring does."""

from __future__ import annotations

from helpers.docs_pages import maker


def test_the_drawn_ring_ends_with_all_numbers_everywhere() -> None:
    steps = maker("communication").ring_steps()
    everybody = {0, 1, 2, 3}
    assert [[piece == everybody for piece in pieces] for pieces in steps[3][0]] == [
        [rank == piece for piece in range(4)] for rank in range(4)
    ]
    assert all(piece == everybody for pieces in steps[-1][0] for piece in pieces)
