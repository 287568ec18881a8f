"""Divisors and the nearest value that works, for the rules' messages."""

from __future__ import annotations

from math import isqrt


def divisors(n: int) -> list[int]:
    """Every divisor of n, in order."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest(value: int, options: list[int]) -> int:
    """The option closest to value, the smaller one of two."""
    return min(options, key=lambda o: (abs(o - value), o))


def either(options: list[int]) -> str:
    """`1, 2 or 4`."""
    words = [str(o) for o in options]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
