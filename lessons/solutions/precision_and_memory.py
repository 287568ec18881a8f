"""Right answers to exercises/precision_and_memory.py. Try it yourself first."""


def next_scale(scale: float, good: int, finite: bool, interval: int) -> tuple[float, int]:
    return (scale / 2, 0) if not finite else (scale * 2, 0) if good + 1 == interval else (scale, good + 1)


def recompute_cost(layers: int, recomputed: int) -> float:
    return (3 * layers + recomputed) / (3 * layers)
