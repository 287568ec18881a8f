"""The questions of the exercise of lessons/experts.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "rows_of_ranks",
        "Expert e is on rank e // (experts // ranks); count every choice of every token.",
        (([[0, 1], [2, 3]], 4, 2), [2, 2]),
        (([[0, 1], [1, 3], [0, 2]], 4, 4), [2, 2, 1, 1]),
    ),
    Question(
        "imbalance",
        "Divide the largest number by the mean.",
        (([4, 4],), 1.0),
        (([9, 3, 0, 0],), 3.0),
    ),
)
