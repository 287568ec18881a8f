"""The questions of the exercise of lessons/fewer_exchanges.py."""

from torch import tensor

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "compress",
        "Add the residual first, keep the k numbers of the largest size, and return the rest as the new residual.",
        (
            (tensor([3.0, -5.0, 1.0, 0.5]), tensor([0.0, 0.0, 0.0, 0.0]), 1),
            (tensor([0.0, -5.0, 0.0, 0.0]), tensor([3.0, 0.0, 1.0, 0.5])),
        ),
        (
            (tensor([3.0, -5.0, 1.0, 0.5]), tensor([3.0, 0.0, 0.0, 2.0]), 2),
            (tensor([6.0, -5.0, 0.0, 0.0]), tensor([0.0, 0.0, 1.0, 2.5])),
        ),
    ),
    Question(
        "bytes_a_step",
        "A ring sends 2 (ranks - 1) / ranks of the tensor, and here only in one of every steps.",
        ((8.0, 4, 1), 12.0),
        ((8.0, 4, 6), 2.0),
    ),
)
