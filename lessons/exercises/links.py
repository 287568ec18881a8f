"""How long does a message take? Replace each ... by your answer, then run: weft lesson links --check"""


def message_seconds(size: float, latency: float, bandwidth: float) -> float:
    """Seconds of a message of `size` bytes over a link with a latency in seconds and a bandwidth in bytes a
    second."""
    return ...


def half_speed_size(latency: float, bandwidth: float) -> float:
    """Bytes of the message that takes half of its time for the latency, so that it travels at half of the
    bandwidth."""
    return ...
