"""What a ring sends. Replace each ... by your answer, then run: weft lesson collectives --check"""


def bytes_sent(ranks: int, size: float) -> float:
    """Bytes that each rank sends in a ring all-reduce of a tensor of `size` bytes."""
    return ...


def shard_to_send(rank: int, step: int, ranks: int) -> int:
    """In a ring all-gather every rank begins with the shard of its own number and sends to rank + 1. The number
    of the shard that `rank` sends in `step`, counted from 0: the one that it received in the step before."""
    return ...
