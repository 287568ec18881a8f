"""Right answers to exercises/zero.py. Try it yourself first."""


def state_bytes(weights: float, ranks: int, stage: int) -> float:
    return weights * (
        (2 if stage < 3 else 2 / ranks) + (2 if stage < 2 else 2 / ranks) + (12 if stage < 1 else 12 / ranks)
    )


def traffic(size: float, ranks: int, stage: int) -> float:
    return (3 if stage == 3 else 2) * size * (ranks - 1) / ranks
