"""`comm.compression` as a person writes it: a kind, and for some a number after a colon."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE, TIMES, RANK = "a share of the elements above 0 and up to 1", "a number above 0", "a whole number from 1 up"

KINDS: dict[str, tuple[float, str] | None] = {
    "none": None, "fp16": None, "bf16": None, "int8": None, "int4": None, "topk": (0.01, SHARE),
    "threshold": (3.0, TIMES), "powersgd": (4, RANK), "onebit": None, "adaptive": None,
}  # fmt: skip
"""What gradients may travel as; for those with a number its default and what it must be."""

WRITTEN = "none, fp16, bf16, int8, int4, topk:0.01, threshold:3, powersgd:4, onebit or adaptive"


@dataclass(frozen=True)
class Compression:
    """What gradients travel as between data-parallel ranks."""

    kind: str = "none"
    number: float = 0.0

    def __str__(self) -> str:
        return self.kind if KINDS[self.kind] is None else f"{self.kind}:{self.number:g}"


def parse_compression(text: str) -> Compression:
    """Read `kind` or `kind:number`; raises ValueError with what it must be."""
    kind, colon, written = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"must be {WRITTEN}")
    wants = KINDS[kind]
    if wants is None:
        if colon:
            raise ValueError(f"must be {kind}, which takes no number")
        return Compression(kind)
    default, what = wants
    try:
        number = float(written) if colon else default
    except ValueError:
        number = math.nan
    good = {SHARE: 0 < number <= 1, TIMES: 0 < number < math.inf, RANK: number >= 1 and number == number // 1}
    if not good[what]:
        raise ValueError(f"must be {kind}:{default:g} or the like, with {what} after the colon")
    return Compression(kind, number)
