"""The questions of the exercise of lessons/pipeline.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "bubble",
        "Every rank waits for ranks - 1 microbatches; a step takes as long as microbatches + ranks - 1 of them.",
        ((4, 16), 3 / 19),
        ((4, 1), 0.75),
        ((1, 8), 0.0),
    ),
    Question(
        "kept",
        "The last stage runs each backward at once; each earlier one fills the pipeline with one microbatch more.",
        ((0, 4, 16), 4),
        ((3, 4, 16), 1),
        ((0, 4, 2), 2),
    ),
)
