"""气泡与显存。把每处 ... 换成你的答案，然后运行：weft lesson pipeline --check"""


def bubble(ranks: int, microbatches: int) -> float:
    """GPipe 或 1F1B 中，一个 rank 在一步里空闲的时间比例。"""
    return ...


def kept(rank: int, ranks: int, microbatches: int) -> int:
    """1F1B 中一个阶段同时保留的微批数的最大值。"""
    return ...
