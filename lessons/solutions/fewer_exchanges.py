"""Right answers to exercises/fewer_exchanges.py. Try it yourself first."""

import torch


def compress(gradient: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        (gradient + residual).where((gradient + residual).abs() >= (gradient + residual).abs().topk(k).values[-1], 0.0),
        (gradient + residual).where((gradient + residual).abs() < (gradient + residual).abs().topk(k).values[-1], 0.0),
    )


def bytes_a_step(size: float, ranks: int, every: int) -> float:
    return 2 * (ranks - 1) / ranks * size / every
