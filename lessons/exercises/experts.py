"""Who receives how much. Replace each ... by your answer, then run: weft lesson experts --check"""


def rows_of_ranks(chosen: list[list[int]], experts: int, ranks: int) -> list[int]:
    """Rows that each rank computes. `chosen` has the experts of each token; a rank holds experts / ranks
    experts in order."""
    return ...


def imbalance(rows: list[int]) -> float:
    """How many times the mean the busiest rank has. 1 is even."""
    return ...
