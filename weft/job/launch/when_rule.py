"""Rules of `launch.when`: prices and hours at which a run may run."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
PRICE = re.compile(r"([a-z][a-z0-9_]*)\s*(<=|>=|<|>)\s*(\d+(?:\.\d+)?)\s*(?:[A-Za-z€$£]+(?:/[A-Za-z-]+)?)?")
HOURS = re.compile(r"(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)")
EXAMPLES = "'spot < 2 USD/h', '22:00-06:00', 'sat-sun' or 'mon-fri 22:00-06:00', joined by `and` and `or`"


@dataclass(frozen=True)
class PriceLimit:
    """A comparison of a named number, such as spot < 2 USD/h."""

    text: str
    name: str
    sign: str
    limit: float

    def holds(self, now: datetime, prices: Mapping[str, float | None]) -> bool | None:
        value = prices.get(self.name)
        return None if value is None else COMPARISONS[self.sign](value, self.limit)


@dataclass(frozen=True)
class Hours:
    """Days of the week and minutes of the day, in local time; hours that pass midnight belong to the day they begin."""

    text: str
    days: frozenset[int]
    begin: int
    end: int

    def holds(self, now: datetime, prices: Mapping[str, float | None]) -> bool | None:
        minute, today = now.hour * 60 + now.minute, now.weekday()
        if self.begin < self.end:
            return today in self.days and self.begin <= minute < self.end
        late, early = minute >= self.begin, minute < self.end
        return (late and today in self.days) or (early and (today - 1) % 7 in self.days)


@dataclass(frozen=True)
class Rule:
    """Alternatives, of which one must hold; all conditions of an alternative must."""

    alternatives: tuple[tuple[PriceLimit | Hours, ...], ...]

    @property
    def names(self) -> set[str]:
        """The prices that it compares."""
        return {part.name for parts in self.alternatives for part in parts if isinstance(part, PriceLimit)}

    def holds(self, now: datetime, prices: Mapping[str, float | None]) -> bool | None:
        """Whether the rule holds; None if that depends on a price that is not known."""
        found = [_all([part.holds(now, prices) for part in parts]) for parts in self.alternatives]
        return True if True in found else None if None in found else False


def _all(values: list[bool | None]) -> bool | None:
    return False if False in values else None if None in values else True


def parse_rule(text: str) -> Rule:
    """Parse a rule; a ValueError says what is wrong with it."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    joined = " or ".join(line for line in lines if line)
    if not joined:
        raise ValueError(f"must have a condition: {EXAMPLES}")
    alternatives = re.split(r"\s+or\s+", joined)
    return Rule(tuple(tuple(_condition(part) for part in re.split(r"\s+and\s+", each)) for each in alternatives))


def _condition(text: str) -> PriceLimit | Hours:
    if found := PRICE.fullmatch(text.strip()):
        return PriceLimit(text, found[1], found[2], float(found[3]))
    days, hours = _split_days(text.strip().lower())
    if hours is None:
        raise ValueError(f"must be a rule, and {text!r} is not a condition: {EXAMPLES}")
    return Hours(text, days, *hours)


def _split_days(text: str) -> tuple[frozenset[int], tuple[int, int] | None]:
    """The days and the minutes of a condition on hours; None for the minutes if it is not one."""
    first, _, rest = text.partition(" ")
    days = _days(first)
    if days is None:
        days, rest = frozenset(range(7)), text
    elif not rest.strip():
        return days, (0, 24 * 60)
    found = HOURS.fullmatch(rest.strip())
    if found is None:
        return days, None
    begin, end = (int(found[i]) * 60 + int(found[i + 1]) for i in (1, 3))
    valid = all(int(found[i]) < 60 for i in (2, 4)) and max(begin, end) <= 24 * 60 and begin != end
    return days, (begin % (24 * 60), end) if valid else None


def _days(text: str) -> frozenset[int] | None:
    found: set[int] = set()
    for part in text.split(","):
        ends = part.split("-")
        if len(ends) > 2 or any(day not in DAYS for day in ends):
            return None
        first, last = DAYS.index(ends[0]), DAYS.index(ends[-1])
        found |= {day % 7 for day in range(first, last + (7 if last < first else 0) + 1)}
    return frozenset(found)
