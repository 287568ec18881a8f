"""谁收到多少。把每处 ... 换成你的答案，然后运行：weft lesson experts --check"""


def rows_of_ranks(chosen: list[list[int]], experts: int, ranks: int) -> list[int]:
    """每个 rank 要计算的行数。`chosen` 是每个词元选中的专家；每个 rank 按顺序持有 experts / ranks 个专家。"""
    return ...


def imbalance(rows: list[int]) -> float:
    """最忙的 rank 的行数是平均值的多少倍。1 表示完全均匀。"""
    return ...
