"""The questions of the exercise of lessons/collectives.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "bytes_sent",
        "An all-reduce is a reduce-scatter and an all-gather, and each sends ranks - 1 shards of size / ranks.",
        ((2, 10.0), 10.0),
        ((4, 96.0), 144.0),
        ((1, 8.0), 0.0),
    ),
    Question(
        "shard_to_send",
        "The shard that comes from rank - 1 is the one that rank - 1 had a step ago; count modulo ranks.",
        ((0, 0, 4), 0),
        ((0, 1, 4), 3),
        ((2, 3, 4), 3),
        ((1, 1, 3), 0),
    ),
)
