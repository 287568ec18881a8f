"""Right answers to exercises/experts.py. Try it yourself first."""


def rows_of_ranks(chosen: list[list[int]], experts: int, ranks: int) -> list[int]:
    return [sum(e // (experts // ranks) == rank for token in chosen for e in token) for rank in range(ranks)]


def imbalance(rows: list[int]) -> float:
    return max(rows) / (sum(rows) / len(rows))
