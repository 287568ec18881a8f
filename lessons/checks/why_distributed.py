"""The questions of the exercise of lessons/why_distributed.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "training_bytes",
        "Add the bytes of each copy: 2 for bf16, 4 for each number in fp32; AdamW has two.",
        ((1.0,), 18.0),
        ((7e9,), 126e9),
    ),
    Question(
        "training_days",
        "Operations are 6 · weights · tokens; a day has 86,400 seconds; only the share mfu of the peak is reached.",
        ((1.0, 86400.0, 1, 6.0, 1.0), 1.0),
        ((7e9, 1e12, 64, 989e12, 0.4), 6 * 7e9 * 1e12 / (64 * 989e12 * 0.4 * 86400)),
    ),
)
