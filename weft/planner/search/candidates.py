"""Layouts: many candidate layouts, as one array per setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.job.compression import COMPRESSORS
from weft.planner.plan import Plan
from weft.planner.schedules.known_schedules import LAST_STAGE_ON_FIRST_RANK, SCHEDULE_NAMES, resolve_name

IntArray = NDArray[np.int64]

RECOMPUTES = ("none", "selective", "full")
"""Keep every activation, all but attention's inner ones, or only each block's input."""
OFFLOADS = ("none", "optimizer", "activations")
"""What is kept in host memory. Weft's own states are placed after the search (memory/tiers.py)."""
_WITHOUT_STATES = {"states": "none", "all": "activations", "auto": "none"}
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
CP_STYLES = ("ring", "ulysses", "hybrid")
NEAREST_FIRST = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""Axes of the mesh from neighbouring ranks outwards."""


@dataclass(frozen=True)
class Layouts:
    """Equal-length arrays, one entry per candidate. Codes index the tuples above."""

    dp_replicate: IntArray
    dp_shard: IntArray
    zero: IntArray
    """0: plain replicas (dp_shard is 1), else the ZeRO stage, as in parallel.zero."""
    tp: IntArray
    sequence: NDArray[np.bool_]
    cp: IntArray
    cp_style: IntArray
    pp: IntArray
    virtual_stages: IntArray
    schedule: IntArray
    ep: IntArray
    microbatch: IntArray
    accumulation: IntArray
    recompute: IntArray
    recompute_blocks: IntArray
    """How many blocks of the model are recomputed; -1: all of them."""
    offload: IntArray
    precision: IntArray
    compression: IntArray

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> IntArray:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> IntArray:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def back_and_forth(self) -> NDArray[np.bool_]:
        """Whether stages go down the ranks and back up, so that the last one is on the first rank."""
        return np.asarray(LAST_STAGE_ON_FIRST_RANK[self.schedule], bool)

    @property
    def element_bytes(self) -> NDArray[np.float64]:
        """Bytes of an activation, and of a weight in products."""
        return np.where(self.precision == PRECISIONS.index("fp32"), 4.0, 2.0)

    def take(self, chosen: Any) -> Layouts:
        """The layouts selected by a mask, a slice or indices."""
        if isinstance(chosen, np.ndarray) and chosen.dtype != bool:
            return Layouts(**{name: array.take(chosen) for name, array in self.arrays()})  # faster than an index
        return Layouts(**{name: array[chosen] for name, array in self.arrays()})

    def arrays(self) -> Iterator[tuple[str, Any]]:
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    @classmethod
    def of(cls, **given: Any) -> Layouts:
        """From arrays or numbers; a number applies to all, and what is left out takes its default."""
        filled = {**_DEFAULTS, **given}
        size = np.broadcast(*filled.values()).shape or (1,)
        return cls(
            **{
                name: np.broadcast_to(np.asarray(value, bool if name == "sequence" else np.int64), size)
                for name, value in filled.items()
            }
        )

    @classmethod
    def one(cls, plan: Plan) -> Layouts:
        """The layout of one plan."""
        return cls.of(**_codes(plan))

    @classmethod
    def join(cls, parts: Iterable[Layouts]) -> Layouts:
        """Several layouts concatenated."""
        parts = list(parts)
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)})

    def plan(self, i: int, like: Plan | None = None) -> Plan:
        """Candidate i as a Plan; device, backend and the like are taken from `like`."""
        known = like or Plan(device="cuda", device_name="h100-sxm", backend="nccl")
        numbers = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual_stages", "microbatch", "accumulation")
        values: dict[str, Any] = {name: int(getattr(self, name)[i]) for name in numbers}
        for name, words in _CODED.items():
            if name in Plan.__dataclass_fields__:
                values[name] = words()[int(getattr(self, name)[i])]
        if _WITHOUT_STATES.get(known.offload) == values["offload"]:
            values["offload"] = known.offload
        if values["compression"] == known.compression.partition(":")[0]:
            values["compression"] = known.compression  # with its number
        if self.recompute_blocks[i] >= 0:
            values["recompute"] = int(self.recompute_blocks[i])
        return replace(known, **values, zero=int(self.zero[i]) or 3, sequence=bool(self.sequence[i]), split=())


def without_states(offload: str) -> str:
    """What a setting of memory.offload means for activations."""
    return _WITHOUT_STATES.get(offload, offload)


def distinct(*columns: Any) -> tuple[IntArray, IntArray]:
    """First index of each combination of whole numbers in columns, and for each entry the position of its combination.

    Columns become digits of one number; a table over all its values is faster than sorting.
    """
    count = len(columns[0])
    largest = 8 * count + 4096
    key, size = np.zeros(count, np.int64), 1
    for column in columns if count else ():
        digit = np.asarray(column, np.int64)
        low, high = int(digit.min()), int(digit.max())
        if low == high:
            continue
        digit, base = digit - low if low else digit, high - low + 1
        if base > largest:
            values, digit = np.unique(digit, return_inverse=True)
            base = len(values)
        if size * base > largest:
            values, digit = _numbered(digit, base)
            base = len(values)
        if size * base > largest:
            values, key = _numbered(key, size)
            size = len(values)
        key, size = key * base + digit, size * base
    return _numbered(key, size)


def _numbered(key: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """`distinct` of numbers below `size`."""
    there = np.zeros(size, np.bool_)
    there[key] = True
    values = np.flatnonzero(there)
    number = np.empty(size, np.int64)
    number[values] = np.arange(len(values))
    position = number.take(key)
    first = np.empty(len(values), np.int64)
    first[position[::-1]] = np.arange(len(key) - 1, -1, -1)
    return first, position


def hashed(*columns: Any) -> NDArray[np.uint64]:
    """A 64-bit hash of each combination of values in columns."""
    key = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        key = (key ^ np.asarray(column).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


_CODED: dict[str, Callable[[], tuple[str, ...]]] = {
    "schedule": lambda: SCHEDULE_NAMES,
    "recompute": lambda: RECOMPUTES,
    "offload": lambda: OFFLOADS,
    "precision": lambda: PRECISIONS,
    "compression": COMPRESSORS.names,
    "cp_style": lambda: CP_STYLES,
}

_DEFAULTS: dict[str, Any] = {
    **{f.name: 1 for f in fields(Layouts)},
    **{name: 0 for name in _CODED},
    "zero": 0, "sequence": False, "recompute_blocks": -1, "precision": PRECISIONS.index("bf16"),
}  # fmt: skip


def _codes(plan: Plan) -> dict[str, Any]:
    codes: dict[str, Any] = {
        name: getattr(plan, name) for name in _DEFAULTS if hasattr(plan, name) and name not in _CODED
    }
    codes["zero"] = plan.zero if plan.dp_shard > 1 else 0
    names = {name: getattr(plan, name) for name in _CODED if hasattr(plan, name)}
    names["offload"] = without_states(plan.offload)
    names["schedule"] = resolve_name(plan.schedule, plan.virtual_stages)
    if str(names["recompute"]).isdigit():  # a count of blocks
        codes["recompute_blocks"], names["recompute"] = int(names["recompute"]), "full"
    names["compression"] = names["compression"].partition(":")[0]
    return codes | {name: _CODED[name]().index(word) for name, word in names.items()}
