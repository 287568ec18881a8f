"""Right answers to exercises/links.py. Try it yourself first."""


def message_seconds(size: float, latency: float, bandwidth: float) -> float:
    return latency + size / bandwidth


def half_speed_size(latency: float, bandwidth: float) -> float:
    return latency * bandwidth
