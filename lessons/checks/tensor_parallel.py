"""The questions of the exercise of lessons/tensor_parallel.py."""

import torch
import torch.nn.functional as F

from weft.cli.lessons.question import Question

generator = torch.Generator().manual_seed(0)
x, first, second = (torch.randn(shape, generator=generator) for shape in ((3, 8), (12, 8), (8, 12)))


def part(rank: int, ranks: int) -> torch.Tensor:
    rows = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
    return F.gelu(x @ first[rows].t()) @ second[:, rows].t()


QUESTIONS = (
    Question(
        "partial",
        "Use the chunk of the rows of first, apply GELU, then use the same chunk of the columns of second.",
        *(((x, first, second, rank, ranks), part(rank, ranks)) for rank, ranks in ((0, 1), (0, 2), (2, 3))),
    ),
    Question(
        "all_reduces",
        "Attention and the MLP are a pair each, and a pair has one all-reduce forward and one backward.",
        ((1,), 4),
        ((32,), 128),
    ),
)
