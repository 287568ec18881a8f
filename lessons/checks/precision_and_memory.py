"""The questions of the exercise of lessons/precision_and_memory.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "next_scale",
        "Not finite: halve and count from 0. Otherwise count one more; at interval, double and count from 0.",
        ((8.0, 3, False, 4), (4.0, 0)),
        ((8.0, 1, True, 4), (8.0, 2)),
        ((8.0, 3, True, 4), (16.0, 0)),
    ),
    Question(
        "recompute_cost",
        "A layer costs 1 forward and 2 backward; a recomputed layer costs 1 more.",
        ((8, 8), 4 / 3),
        ((8, 0), 1.0),
        ((6, 3), 7 / 6),
    ),
)
