"""The questions of the exercise of lessons/links.py."""

from weft.cli.lessons.question import Question

QUESTIONS = (
    Question(
        "message_seconds",
        "A message pays the latency once, and then size / bandwidth.",
        ((0.0, 2e-5, 1e9), 2e-5),
        ((4e6, 1e-3, 1e9), 5e-3),
    ),
    Question(
        "half_speed_size",
        "Latency and size / bandwidth are equal for this message.",
        ((1e-3, 2e9), 2e6),
        ((5e-6, 50e9), 250000.0),
    ),
)
