"""放得下吗？把每处 ... 换成你的答案，然后运行：weft lesson choosing_a_layout --check"""


def smallest_shards(weights: float, memory: float, activations: float) -> int:
    """每个权重 16 字节的状态平均切分后，与 `activations` 字节的激活值一起放进每个设备 `memory` 字节所需的最少设
    备数（取 2 的幂）。"""
    return ...


def dp_and_tp(devices: int) -> list[tuple[int, int]]:
    """所有满足 dp · tp = devices 的 (dp, tp)，按 tp 从小到大排列。"""
    return ...
