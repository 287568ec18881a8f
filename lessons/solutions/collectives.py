"""Right answers to exercises/collectives.py. Try it yourself first."""


def bytes_sent(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) / ranks * size


def shard_to_send(rank: int, step: int, ranks: int) -> int:
    return (rank - step) % ranks
