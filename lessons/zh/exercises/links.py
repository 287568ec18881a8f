"""一条消息需要多长时间？把每处 ... 换成你的答案，然后运行：weft lesson links --check"""


def message_seconds(size: float, latency: float, bandwidth: float) -> float:
    """在延迟为 `latency` 秒、带宽为每秒 `bandwidth` 字节的链路上，发送 `size` 字节所需的秒数。"""
    return ...


def half_speed_size(latency: float, bandwidth: float) -> float:
    """消息有一半时间花在延迟上（即达到一半带宽）时的字节数。"""
    return ...
