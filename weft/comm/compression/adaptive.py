"""`comm.compression: adaptive`: the least compression that hides communication behind the backward pass.

Every few steps the ranks measure their link, the time of a step and when each bucket was ready. From that they compute
how long each bucket would take at each of LEVELS, and choose. Before the first step only the link is known, and
FIRST_LEVEL is used where it is faster. All ranks use the slowest rank's figures, so they choose the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.axis import Axis, Pending
from weft.comm.background import Done
from weft.comm.compression.codec_base import RoundingNoise
from weft.comm.compression.codecs import codecs_of
from weft.comm.compression.compressed_sum import sum_all
from weft.job.compression import parse_compression

LEVELS = ("none", "bf16", "int8", "int4", "topk:0.04")
"""From the least compression to the most."""
MAX_WARMUP_LEVEL = LEVELS.index("int4")
"""The strongest compression allowed during warm-up: top-k delays the rest (planner/time/compression_warmup.py)."""
FIRST_LEVEL = LEVELS.index("int8")
"""The level before the time of a step is known: its rounding is harmless."""

MAX_EXPOSED_SHARE = 0.05
"""Exposed communication, as a share of the forward and backward pass, that counts as hidden."""
LOWERING_MARGIN = 0.7
"""Compression is lowered only if the exposed time stays below this share of what is allowed."""
CHECKS_BEFORE_LOWERING = 3
"""Measurements in a row after which compression is lowered; it is raised at once."""
MAX_TIME_SHARE = 0.9
"""A level that takes more than this share of the time of the one below is not used."""
MAX_SLOWDOWN, CHECKS_AFTER_SLOWDOWN = 1.05, 10
"""If a step takes more than this multiple of its time with less compression, the choice is reverted, and no higher
level is tried for so many measurements."""

SMALL_PROBE_BYTES, MIN_PROBE_BYTES, MAX_PROBE_BYTES = 2**16, 2**18, 2**21
"""Bytes of the messages that measure a link: a small one, within the burst of a traffic shaper, and a larger one
between the other two."""
PROBE_S = 0.05
"""Time that the larger message should take, estimated from the small one."""
SAMPLE_ELEMENTS = 2**19


@dataclass(frozen=True)
class Figures:
    """What a choice is based on; the slowest rank's figures."""

    latency_s: float
    bytes_per_s: float
    step_s: float
    ready_s: tuple[float, ...]
    """When each bucket was ready, in send order."""
    code_s: tuple[float, ...]
    """Seconds of encoding and decoding for each number, by level; half of that if each rank gets only its part."""


def sent_bytes(level: str, n: int, ranks: int, scattered: bool) -> float:
    """Bytes a rank sends for a bucket of n numbers; `scattered` where each rank gets only its part of the sum."""
    codec = codecs_of(parse_compression(level)).gradients
    size = 4.0 * n if codec is None else float(codec.bytes_of(n))
    if scattered:
        return size * (ranks - 1) / ranks
    return size * (ranks - 1) * (1.0 if codec is not None and codec.sparse else 2 / ranks)


def seconds_by_level(figures: Figures, sizes: Sequence[int], ranks: int, scattered: bool) -> list[list[float]]:
    """Seconds by bucket and level."""
    return [
        [
            figures.latency_s
            + sent_bytes(level, n, ranks, scattered) / figures.bytes_per_s
            + n * code * (0.5 if scattered else 1)
            for level, code in zip(LEVELS, figures.code_s, strict=True)
        ]
        for n in sizes
    ]


def exposed_seconds(ready: Sequence[float], travel: Sequence[float]) -> float:
    """Seconds from when all buckets are ready until the last has arrived, if they are sent one after the other."""
    clock = 0.0
    for begins, takes in zip(ready, travel, strict=True):
        clock = max(clock, begins) + takes
    return clock - max(ready)


def lowest_levels(ready: Sequence[float], table: list[list[float]], allowed_s: float) -> list[int]:
    """The lowest levels with at most `allowed_s` exposed, or as little as possible.

    Of the buckets at the lowest level, the last one is raised first, since it has the least time.
    """
    levels = [0] * len(table)

    def next_level(bucket: int) -> int | None:
        now = table[bucket][levels[bucket]]
        return next(
            (r for r in range(levels[bucket] + 1, len(table[bucket])) if table[bucket][r] <= MAX_TIME_SHARE * now), None
        )

    while exposed_seconds(ready, [row[r] for row, r in zip(table, levels, strict=True)]) > allowed_s:
        able = [(levels[b], -b) for b in range(len(table)) if next_level(b) is not None]
        if not able:
            break
        bucket = -min(able)[1]
        levels[bucket] = next_level(bucket) or 0
    return levels


@dataclass
class AdaptiveChoice:
    """The level of each bucket, and how often a lower one would have been enough."""

    sizes: list[int]
    ranks: int
    scattered: bool
    levels: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    tried: tuple[list[int], float] | None = None
    """The levels before compression was last raised, and the time of a step with them."""
    wary: tuple[list[int], int] | None = None
    """Levels above which steps were slower, and for how many more measurements they are not exceeded."""

    def __post_init__(self) -> None:
        self.levels = self.levels or self.none
        self.idle = list(self.none)

    def begin(self, figures: Figures) -> str | None:
        """Choose before the first step; returns the reason if something changed."""
        table = seconds_by_level(figures, self.sizes, self.ranks, self.scattered)
        self.levels = [FIRST_LEVEL if row[FIRST_LEVEL] <= MAX_TIME_SHARE * row[0] else 0 for row in table]
        if not any(self.levels):
            return None
        plain, chosen = (sum(row[r] for row, r in zip(table, some, strict=True)) for some in (self.none, self.levels))
        return (
            f"{_link(figures)}, uncompressed gradients would travel for {plain:.2f} s, these for {chosen:.2f} s; the "
            "computation time of a step is not known yet"
        )

    @property
    def none(self) -> list[int]:
        return [0] * len(self.sizes)

    def look(self, figures: Figures, highest: int = len(LEVELS) - 1) -> str | None:
        """Choose again, up to a level; returns the reason if something changed."""
        if (why := self._revert(figures.step_s)) is not None:
            return why
        limits = [min(highest, most) for most in self.wary[0]] if self.wary else [highest] * len(self.sizes)
        rows = seconds_by_level(figures, self.sizes, self.ranks, self.scattered)
        table = [row[: max(most, now) + 1] for row, most, now in zip(rows, limits, self.levels, strict=True)]
        allowed = MAX_EXPOSED_SHARE * max(figures.ready_s)
        need = lowest_levels(figures.ready_s, table, allowed)
        safe = lowest_levels(figures.ready_s, table, LOWERING_MARGIN * allowed)
        before = list(self.levels)
        for b, now in enumerate(before):
            self.idle[b] = self.idle[b] + 1 if now > max(need[b], safe[b]) else 0
            if now < need[b]:
                self.levels[b] = need[b]
            elif self.idle[b] >= CHECKS_BEFORE_LOWERING:
                self.levels[b], self.idle[b] = max(need[b], safe[b]), 0
        if self.levels == before:
            return None
        if any(now > then for now, then in zip(self.levels, before, strict=True)):
            self.tried = before, figures.step_s
        plain = exposed_seconds(figures.ready_s, [row[0] for row in table])
        chosen = exposed_seconds(figures.ready_s, [row[r] for row, r in zip(table, self.levels, strict=True)])
        return (
            f"{_link(figures)}, uncompressed gradients would hold up a step of {figures.step_s:.2f} s for "
            f"{max(0, plain):.2f} s; "
            f"these for {max(0, chosen):.2f} s"
        )

    def _revert(self, step_s: float) -> str | None:
        """Go back to the former levels if steps take longer since compression was raised."""
        if self.wary is not None:
            self.wary = (self.wary[0], self.wary[1] - 1) if self.wary[1] > 1 else None
        if self.tried is None:
            return None
        (before, took), self.tried = self.tried, None
        if step_s <= MAX_SLOWDOWN * took:
            return None
        self.levels, self.idle, self.wary = before, list(self.none), (list(before), CHECKS_AFTER_SLOWDOWN)
        return f"a step took {took:.2f} s with less compression and {step_s:.2f} s since"

    def describe(self) -> str:
        """The levels in use, such as `int8 × 3, topk:0.01 × 1`."""
        used = [(LEVELS[r], self.levels.count(r)) for r in sorted(set(self.levels))]
        return ", ".join(f"{name} × {count}" for name, count in used)


def _link(figures: Figures) -> str:
    return f"at {figures.bytes_per_s * 8e-6:.0f} Mb/s and {figures.latency_s * 1e3:.1f} ms a message"


def measure_link(axis: Axis, device: torch.device) -> tuple[float, float]:
    """The latency in seconds, and the bytes per second of a rank that sends to all others."""

    def seconds(size: int) -> float:
        message = torch.zeros(max(1, size // (axis.size - 1)), dtype=torch.uint8, device=device)
        began = time.perf_counter()
        axis.start_gather(message)[1].wait()
        _synchronize(device)
        return time.perf_counter() - began

    seconds(SMALL_PROBE_BYTES)  # the first message of a group also connects it
    [small] = largest_of_ranks([min(seconds(SMALL_PROBE_BYTES), seconds(SMALL_PROBE_BYTES))], [axis], device)
    size = round(min(MAX_PROBE_BYTES, max(MIN_PROBE_BYTES, SMALL_PROBE_BYTES * PROBE_S / small)))
    [large] = largest_of_ranks([seconds(size)], [axis], device)
    if large < 2 * small and size < MAX_PROBE_BYTES:  # dominated by latency, or the small one was delayed
        size = MAX_PROBE_BYTES
        [large] = largest_of_ranks([seconds(size)], [axis], device)
    each = max(large - small, 0.3 * large) / (size - SMALL_PROBE_BYTES)
    return max(small - SMALL_PROBE_BYTES * each, 1e-5), 1 / each


class _EchoAxis:
    """An axis of two ranks, of which the other sends the same at once."""

    size, rank = 2, 0

    def start_swap(self, shards: Tensor) -> tuple[Tensor, Pending]:
        return shards.flip(0), Done()

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        return torch.cat([tensor, tensor]), Done()


def measure_codes(rounding: RoundingNoise, device: torch.device) -> list[float]:
    """Seconds of encoding and decoding for each number, by level: the best of two, since others may use the machine."""
    found, echo = [], cast(Axis, _EchoAxis())
    sample = torch.randn(SAMPLE_ELEMENTS, generator=torch.Generator().manual_seed(0)).to(device)
    for level in LEVELS:
        codec = codecs_of(parse_compression(level)).gradients
        times = [0.0]
        for _ in range(2 if codec is not None else 0):
            x = sample.clone()
            _synchronize(device)
            began = time.perf_counter()
            assert codec is not None
            sum_all(echo, codec, x, rounding, in_place=True)
            _synchronize(device)
            times.append(time.perf_counter() - began)
        found.append(min(times[1:], default=0.0) / SAMPLE_ELEMENTS)
    return found


def largest_of_ranks(values: list[float], axes: Sequence[Axis], device: torch.device) -> list[float]:
    """The largest of all ranks, for each value."""
    shared: Tensor = torch.tensor(values, dtype=torch.float64, device=device)
    for axis in axes:
        axis.all_reduce(shared, dist.ReduceOp.MAX)
    return [float(v) for v in shared]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
