"""Divisors and the nearest value that works, for the rules' messages."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod


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


def asked_ranks(degrees: Mapping[str, int]) -> tuple[int, str]:
    """The product of degrees, of which -1 takes the rest, and its text: `tp 2 × cp 4`."""
    text = " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1"
    return prod(max(1, degree) for degree in degrees.values()), text
