"""Right answers to exercises/ring_attention.py. Try it yourself first."""

import torch


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    return (lse_a - torch.logaddexp(lse_a, lse_b)).exp().unsqueeze(-1) * out_a + (
        lse_b - torch.logaddexp(lse_a, lse_b)
    ).exp().unsqueeze(-1) * out_b


def chunks(rank: int, ranks: int) -> tuple[int, int]:
    return (rank, 2 * ranks - 1 - rank)
