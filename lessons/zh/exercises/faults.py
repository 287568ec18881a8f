"""何时保存。把每处 ... 换成你的答案，然后运行：weft lesson faults --check"""


def interval(save_s: float, mtbf_s: float) -> float:
    """使损失最小的检查点间隔（秒）：保存占用 save_s / interval，重做占用 interval / (2 · mtbf_s)。"""
    return ...


def resume_from(records: list[tuple[int, bool]]) -> int:
    """应从哪一步恢复。每条记录是步数，以及其字节是否与写入时一致。没有完好的检查点时返回 0。"""
    return ...
