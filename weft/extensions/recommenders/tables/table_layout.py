"""Which rank holds which part of each embedding table, and the groups of tables that are looked up together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from weft.extensions.recommenders.models.tables import TableSpec

EVERY_RANK = ("column", "replicate")
"""Spreads in which every rank holds every row, or a part of it."""


@dataclass(frozen=True)
class Box:
    """The part of a table that a rank holds: rows from … up to, and columns from … up to."""

    first: int
    end: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.end - self.first

    @property
    def width(self) -> int:
        return self.right - self.left


@dataclass(frozen=True)
class TableLayout:
    """A table and the part of it that each rank holds."""

    spec: TableSpec
    spread: str
    boxes: tuple[Box, ...]
    """By rank."""
    home: str = "device"
    cache_rows: int | None = None


def layout_of(spec: TableSpec, placed: Mapping[str, Any], degrees: Sequence[int]) -> TableLayout:
    """The layout of a table as a plan placed it, on a mesh with these degrees."""
    world, spread = prod(degrees), str(placed["spread"])
    whole, none = Box(0, spec.rows, 0, spec.dim), Box(0, 0, 0, spec.dim)
    if spread == "row":
        boxes = tuple(Box(*chunk(spec.rows, degrees, rank), 0, spec.dim) for rank in range(world))
    elif spread == "column":
        boxes = tuple(Box(0, spec.rows, *chunk(spec.dim, degrees, rank)) for rank in range(world))
    elif spread == "table":
        boxes = tuple(whole if rank == placed["rank"] else none for rank in range(world))
    else:
        boxes = (whole,) * world
    return TableLayout(spec, spread, boxes, placed["home"], placed["cache_rows"])


def chunk(size: int, degrees: Sequence[int], rank: int) -> tuple[int, int]:
    """The part of a dim that a rank holds, sharded over each axis of a mesh in turn, as DTensor does."""
    first, below = 0, prod(degrees)
    for degree in degrees:
        below //= degree
        each = -(-size // degree)
        start = min(size, rank // below % degree * each)
        first, size = first + start, min(size, start + each) - start
    return first, first + size


@dataclass(frozen=True)
class TableGroup:
    """Tables of one width whose rows are stored in one tensor and looked up at once.

    A row's key is its number among the rows of all tables of the group. Rows of `table` and `row` tables have one
    owner; every rank holds the keys of `column` and `replicate` tables in the same order.
    """

    tables: tuple[TableLayout, ...]
    bases: dict[str, int]
    """By table, the key of its first row."""

    @property
    def first(self) -> TableLayout:
        return self.tables[0]

    @property
    def spread(self) -> str:
        """owned, column or replicate."""
        return self.first.spread if self.first.spread in EVERY_RANK else "owned"

    @property
    def dim(self) -> int:
        return self.first.spec.dim

    @property
    def world(self) -> int:
        return len(self.first.boxes)

    def columns(self, rank: int) -> tuple[int, int]:
        """The columns that a rank holds."""
        if self.spread == "owned":
            return 0, self.dim
        return self.first.boxes[rank].left, self.first.boxes[rank].right

    def rows(self, rank: int) -> int:
        """Rows that a rank stores."""
        return sum(t.boxes[rank].rows for t in self.tables)

    def local_first(self, rank: int) -> dict[str, int]:
        """By table, where its rows begin in a rank's storage."""
        out, at = {}, 0
        for t in self.tables:
            out[t.spec.name] = at
            at += t.boxes[rank].rows
        return out

    def segments(self) -> list[tuple[int, int, int]]:
        """Of an owned group: first key, owner and place in the owner's storage of each range of keys, rising."""
        local = [self.local_first(rank) for rank in range(self.world)]
        found = [
            (self.bases[t.spec.name] + box.first, rank, local[rank][t.spec.name])
            for t in self.tables
            for rank, box in enumerate(t.boxes)
            if box.rows
        ]
        return sorted(found)


@dataclass
class _Filling:
    tables: list[TableLayout] = field(default_factory=list)
    bases: dict[str, int] = field(default_factory=dict)
    rows: int = 0


def group_tables(tables: Sequence[TableLayout]) -> list[TableGroup]:
    """Tables in groups of the same width, kind of spread and home."""
    filling: dict[tuple[int, str, str], _Filling] = {}
    for t in tables:
        kind = t.spread if t.spread in EVERY_RANK else "owned"
        group = filling.setdefault((t.spec.dim, kind, t.home), _Filling())
        group.tables.append(t)
        group.bases[t.spec.name] = group.rows
        group.rows += t.spec.rows
    return [TableGroup(tuple(g.tables), g.bases) for g in filling.values()]
