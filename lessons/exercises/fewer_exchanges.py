"""Error feedback. Replace each ... by your answer, then run: weft lesson fewer_exchanges --check"""

import torch


def compress(gradient: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is sent, with 0 in place of the numbers that are not, and the new residual. The k largest numbers of
    gradient + residual are sent; the rest is the residual of the next step."""
    return ...


def bytes_a_step(size: float, ranks: int, every: int) -> float:
    """Bytes that a rank sends a step on average, if replicas average `size` bytes of weights by a ring in every
    `every`th step."""
    return ...
