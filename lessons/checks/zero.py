"""The questions of the exercise of lessons/zero.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "state_bytes",
        "Divide by ranks what the stage splits: 12 from stage 1, gradients from stage 2, weights from stage 3.",
        ((1.0, 4, 0), 16.0),
        ((1.0, 4, 1), 7.0),
        ((1.0, 4, 2), 5.5),
        ((1.0, 4, 3), 4.0),
    ),
    Question(
        "traffic",
        "A reduce-scatter and an all-gather; stage 3 gathers the weights once more, for the backward pass.",
        ((8.0, 4, 1), 12.0),
        ((8.0, 4, 2), 12.0),
        ((8.0, 4, 3), 18.0),
    ),
)
