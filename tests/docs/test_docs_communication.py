"""docs/communication.md: its picture of the ring is correct."""

from __future__ import annotations

from helpers.docs_pages import maker


def test_the_ring_ends_with_the_sum_on_every_rank() -> None:
    steps = maker("communication").ring_steps()
    all_ranks = {0, 1, 2, 3}
    assert [[shard == all_ranks for shard in shards] for shards in steps[3][0]] == [
        [rank == shard for shard in range(4)] for rank in range(4)
    ]
    assert all(shard == all_ranks for shards in steps[-1][0] for shard in shards)
