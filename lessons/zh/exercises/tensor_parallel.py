"""一对线性层。把每处 ... 换成你的答案，然后运行：weft lesson tensor_parallel --check"""

import torch


def partial(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """gelu(x firstᵀ) secondᵀ 中属于某个 rank 的部分；所有 rank 的部分之和等于整体。`first` 按列切分，对应张量的
    若干行；`second` 按行切分，对应张量的若干列。"""
    return ...


def all_reduces(layers: int) -> int:
    """一个有 `layers` 层（每层含注意力和 MLP）的 Transformer 每一步前向加反向共需的 all-reduce 次数。"""
    return ...
