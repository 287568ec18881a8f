"""The questions of the exercise of lessons/faults.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "interval",
        "The sum save_s / x + x / (2 · mtbf_s) is least where its two terms are equal.",
        ((60.0, 28800.0), 1859.03200618),
        ((2.0, 100.0), 20.0),
    ),
    Question(
        "resume_from",
        "Take the largest step among the good ones; the list need not be in order.",
        (([(5, True), (10, True)],), 10),
        (([(10, False), (5, True)],), 5),
        (([],), 0),
    ),
)
