"""Right answers to exercises/why_distributed.py. Try it yourself first."""


def training_bytes(weights: float) -> float:
    return weights * (2 + 4 + 4 + 8)


def training_days(weights: float, tokens: float, devices: int, flops: float, mfu: float) -> float:
    return 6 * weights * tokens / (devices * flops * mfu) / 86400
