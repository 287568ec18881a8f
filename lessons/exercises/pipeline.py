"""Bubble and memory. Replace each ... by your answer, then run: weft lesson pipeline --check"""


def bubble(ranks: int, microbatches: int) -> float:
    """The share of a step in which a rank of GPipe or 1F1B is idle."""
    return ...


def kept(rank: int, ranks: int, microbatches: int) -> int:
    """The most microbatches that a stage of 1F1B keeps at once."""
    return ...
