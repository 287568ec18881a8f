"""Right answers to exercises/tensor_parallel.py. Try it yourself first."""

import torch


def partial(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ first.chunk(ranks)[rank].t()) @ second.chunk(ranks, dim=1)[rank].t()


def all_reduces(layers: int) -> int:
    return 4 * layers
