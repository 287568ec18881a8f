"""各阶段的显存与通信量。把每处 ... 换成你的答案，然后运行：weft lesson zero --check"""


def state_bytes(weights: float, ranks: int, stage: int) -> float:
    """每个 rank 的字节数：权重（每个 2 字节）、梯度（2 字节）、主权重与 AdamW 动量（12 字节）。阶段 1 切分最后
    一项，阶段 2 还切分梯度，阶段 3 还切分权重。阶段 0 不切分。"""
    return ...


def traffic(size: float, ranks: int, stage: int) -> float:
    """权重和梯度各为 `size` 字节时，每个 rank 每步发送的字节数。"""
    return ...
