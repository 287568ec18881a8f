"""需要多少显存，多长时间？把每处 ... 换成你的答案，然后运行：weft lesson why_distributed --check"""


def training_bytes(weights: float) -> float:
    """单个设备上用 AdamW 做混合精度训练所需的字节数：bf16 权重、fp32 梯度、fp32 主权重以及两个 fp32 动量。不计
    激活值。"""
    return ...


def training_days(weights: float, tokens: float, devices: int, flops: float, mfu: float) -> float:
    """用 `tokens` 个词元训练所需的天数。每个词元、每个权重需要 6 次运算；每个设备达到峰值 `flops`（每秒运算次数）
    的`mfu` 倍。"""
    return ...
