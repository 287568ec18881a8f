"""Right answers to exercises/choosing_a_layout.py. Try it yourself first."""


def smallest_shards(weights: float, memory: float, activations: float) -> int:
    return next(2**i for i in range(20) if 16 * weights / 2**i + activations <= memory)


def dp_and_tp(devices: int) -> list[tuple[int, int]]:
    return [(devices // tp, tp) for tp in range(1, devices + 1) if devices % tp == 0]
