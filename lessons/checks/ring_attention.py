"""The questions of the exercise of lessons/ring_attention.py."""

import torch

from weft.cli.lessons.question import Question

generator = torch.Generator().manual_seed(0)
scores, values = torch.randn(5, 12, generator=generator), torch.randn(12, 4, generator=generator)


def block(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return scores[:, keys].softmax(-1) @ values[keys], scores[:, keys].logsumexp(-1)


def case(cut: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    return (*block(slice(0, cut)), *block(slice(cut, 12))), scores.softmax(-1) @ values


QUESTIONS = (
    Question(
        "merge",
        "With lse = torch.logaddexp(lse_a, lse_b), weigh each output by exp of its own lse minus that.",
        case(6),
        case(2),
    ),
    Question(
        "chunks",
        "Early chunks have little work and late ones much: give each rank one from the front and one from the end.",
        ((0, 4), (0, 7)),
        ((3, 4), (3, 4)),
        ((1, 2), (1, 2)),
    ),
)
