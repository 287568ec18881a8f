"""Least-squares fit of time = α + β · bytes to measured messages."""

from __future__ import annotations

from collections.abc import Sequence


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """α and β, both at least 0, that minimise the squared relative errors of time = α + β · bytes."""
    w = [1 / t**2 for t in times]
    total = sum(w)
    x = sum(a * s for a, s in zip(w, sizes, strict=True)) / total
    y = sum(a * t for a, t in zip(w, times, strict=True)) / total
    across = sum(a * (s - x) ** 2 for a, s in zip(w, sizes, strict=True))
    beta = sum(a * (s - x) * (t - y) for a, s, t in zip(w, sizes, times, strict=True)) / across if across else 0.0
    if beta < 0:
        return y, 0.0
    if y < beta * x:  # α would be negative
        squares = sum(a * s * s for a, s in zip(w, sizes, strict=True))
        return 0.0, sum(a * s * t for a, s, t in zip(w, sizes, times, strict=True)) / squares
    return y - beta * x, beta
