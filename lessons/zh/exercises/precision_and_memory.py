"""损失缩放与重计算。把每处 ... 换成你的答案，然后运行：weft lesson precision_and_memory --check"""


def next_scale(scale: float, good: int, finite: bool, interval: int) -> tuple[float, int]:
    """一步之后的缩放系数和连续正常步数。梯度出现非有限值时，系数减半、计数归 0；使计数达到 `interval` 的那一步，
    系数加倍、计数归 0。"""
    return ...


def recompute_cost(layers: int, recomputed: int) -> float:
    """`layers` 层中有 `recomputed` 层重计算时，一步的运算量与不重计算时之比。一层的反向运算量是前向的 2 倍。"""
    return ...
