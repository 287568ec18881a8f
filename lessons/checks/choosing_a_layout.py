"""The questions of the exercise of lessons/choosing_a_layout.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "smallest_shards",
        "Try 1, 2, 4, … devices: 16 · weights / devices + activations must be at most memory.",
        ((7e9, 80e9, 0.0), 2),
        ((7e9, 80e9, 40e9), 4),
        ((1e9, 80e9, 10e9), 1),
        ((70e9, 80e9, 20e9), 32),
    ),
    Question(
        "dp_and_tp",
        "tp must divide devices; dp is the quotient.",
        ((4,), [(4, 1), (2, 2), (1, 4)]),
        ((6,), [(6, 1), (3, 2), (2, 3), (1, 6)]),
    ),
)
