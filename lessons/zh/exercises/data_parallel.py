"""大批量的学习率。把每处 ... 换成你的答案，然后运行：weft lesson data_parallel --check"""


def learning_rate(step: int, base_rate: float, base_batch: int, batch: int, warmup: int) -> float:
    """第 `step` 步（从 1 数起）的学习率。它从 0 线性上升，到第 `warmup` 步达到按线性缩放规则得到的学习率。"""
    return ...


def share(rank: int, ranks: int, batch: int) -> tuple[int, int]:
    """批量按顺序平均分配时，某个 rank 的第一个样本编号，以及最后一个样本编号加 1。"""
    return ...
