"""The questions of the exercise of lessons/data_parallel.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "learning_rate",
        "The scaled rate is base_rate · batch / base_batch; before step warmup it is multiplied by step / warmup.",
        ((10, 0.1, 256, 1024, 10), 0.4),
        ((5, 0.1, 256, 1024, 10), 0.2),
        ((100, 0.1, 256, 256, 10), 0.1),
    ),
    Question(
        "share",
        "Each rank has batch / ranks samples; rank 0 begins with sample 0.",
        ((0, 4, 64), (0, 16)),
        ((3, 4, 64), (48, 64)),
        ((1, 2, 6), (3, 6)),
    ),
)
