"""Numbers as the planner prints them, and differences of the numbers as printed."""

from __future__ import annotations


def gib(value: float) -> str:
    """A size in GiB with one digit after the point; with none from 100, with two below 1."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def gib_difference(value: float, other: float) -> float:
    """The difference of two sizes as `gib` prints them."""
    return round(float(gib(value)) - float(gib(other)), 2)


def seconds(value: float) -> str:
    """A duration in s, ms or µs with four digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            rounded = _four_digits(value / size)
            return f"{rounded:,.0f} {unit}" if abs(rounded) >= 1000 else f"{rounded:.4g} {unit}"
    return f"{value * 1e6:.4g} µs"


def relative_difference(value: float, other: float) -> float:
    """How much longer a duration is than another, as `seconds` prints them, as a share of the other."""
    return _four_digits(value) / _four_digits(other) - 1


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def percent(share: float) -> str:
    """A share as a percentage with two digits."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1 if share >= 0.00995 else 2}f} %"


def duration(hours: float) -> str:
    """A duration in days, hours, minutes or seconds."""
    for unit, size in (("days", 24.0), ("h", 1.0), ("min", 1 / 60), ("s", 1 / 3600)):
        if hours >= 2 * size or unit == "s":
            value = hours / size
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return ""


def amount(value: float) -> str:
    """An amount of money or energy: whole from 10, with two digits below."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"


def rate(value: float) -> str:
    """A rate with three digits, whole from 100."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def counted(n: int, word: str, ending: str = "s") -> str:
    """A number of things, such as `1 block` or `2 blocks`."""
    return f"{n:,} {word}{'' if n == 1 else ending}"


def human_count(n: float) -> str:
    """A count with three digits and a unit: 70.6B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{rate(n / size)}{unit}"
    return f"{n:.0f}"
