"""Cells of a table as numbers and flags."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_UNIT = re.compile(r"(?<=[\d.])\s*(?:(k)|gi?b|s|sec|seconds)\s*$", re.I)
"""A unit behind a number."""


class Unusable(Exception):
    """A row that does not describe a whole run."""


def number_of(text: str) -> float | None:
    """The number of a cell, as `4096`, `12,500`, `8k` or `60 GiB`, or None if it is not a number above 0."""
    plain, kilo = _UNIT.sub("", text), _UNIT.search(text)
    try:
        value = float(plain.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", plain) else plain)
    except ValueError:
        return None
    return value * (1024 if kilo and kilo[1] else 1) if math.isfinite(value) and value > 0 else None


def need(line: Mapping[str, str], name: str) -> int:
    value = number_of(line.get(name, ""))
    if value is None:
        raise Unusable(f"no {name}")
    return max(1, round(value))


def count_of(line: Mapping[str, str], name: str) -> int:
    """A degree; 1 if the row does not give it."""
    return max(1, round(number_of(line.get(name, "")) or 1))


def flag_of(line: Mapping[str, str], name: str, usual: str) -> bool:
    """A flag, as 1, 1.0 or true; `usual` if the table has no such column."""
    return line.get(name, usual).lower() in ("1", "1.0", "true", "yes")
