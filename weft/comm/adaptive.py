"""`comm.compression: adaptive`: the least compression that hides communication behind the backward pass.

Every few steps the ranks measure their link and take in how long a step computes and when each bucket was ready; from
that they reckon, for each bucket and each rung of LADDER, how long it would travel, and choose. Before the first step
they know the link alone, and take FIRST where that is sooner there. All ranks reckon with the slowest rank's figures,
and so choose alike.
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
from weft.comm.codecs import Dice, way_of
from weft.comm.compressed_sum import sum_all
from weft.job.compression import parse_compression

LADDER = ("none", "bf16", "int8", "int4", "topk:0.04")
"""From the least compression to the most."""
YOUNG = LADDER.index("int4")
"""The strongest compression allowed during warm-up: top-k delays the rest (planner/time/compression_warmup.py)."""
FIRST = LADDER.index("int8")
"""What may be taken before it is known how long a step computes: its rounding does no harm to any run."""

STANDS_OUT = 0.05
"""Share of the forward and backward pass that communication may take beyond them and still count as hidden."""
SPARE = 0.7
"""Less compression is tried only where its figures fit into this share of what is allowed."""
PATIENCE = 3
"""Looks in a row after which compression is lowered; it is raised at once."""
WORTH = 0.9
"""A rung that takes more than this share of the time of the one below is not worth its loss."""
SLOWER, WARY = 1.05, 10
"""What a step may take of the time that it took with less compression, before that is gone back to, and for how many
looks then nothing higher is tried."""

SMALL, LEAST, LARGE = 2**16, 2**18, 2**21
"""Bytes of the messages that measure a link: a small one, which takes what a shaper lets pass at once, and a larger
one, which is between the other two."""
PROBE_S = 0.05
"""How long the larger message shall take, as far as the small one tells."""
SAMPLE = 2**19


@dataclass(frozen=True)
class Figures:
    """What a choice is made from; the slowest rank's."""

    latency_s: float
    bytes_per_s: float
    step_s: float
    ready_s: tuple[float, ...]
    """When each bucket could leave, in the order in which they do."""
    code_s: tuple[float, ...]
    """Of the processor for each number that is summed, by rung; where each rank gets its part alone, half of that."""


def sent(rung: str, n: int, ranks: int, scattered: bool) -> float:
    """Bytes a rank sends for a bucket of n numbers; `scattered` where each rank gets only its part of the sum."""
    codec = way_of(parse_compression(rung)).gradients
    size = 4.0 * n if codec is None else float(codec.bytes_of(n))
    if scattered:
        return size * (ranks - 1) / ranks
    return size * (ranks - 1) * (1.0 if codec is not None and codec.sparse else 2 / ranks)


def costs(figures: Figures, sizes: Sequence[int], ranks: int, scattered: bool) -> list[list[float]]:
    """Seconds by bucket and rung."""
    return [
        [
            figures.latency_s
            + sent(rung, n, ranks, scattered) / figures.bytes_per_s
            + n * code * (0.5 if scattered else 1)
            for rung, code in zip(LADDER, figures.code_s, strict=True)
        ]
        for n in sizes
    ]


def stands_out(ready: Sequence[float], travel: Sequence[float]) -> float:
    """Seconds for which the last bucket is awaited, after all are ready, when they leave one after the other."""
    clock = 0.0
    for begins, takes in zip(ready, travel, strict=True):
        clock = max(clock, begins) + takes
    return clock - max(ready)


def least(ready: Sequence[float], table: list[list[float]], allowed_s: float) -> list[int]:
    """The lowest rungs with which no more than `allowed_s` stands out, or as little as can be had.

    The lowest bucket climbs first, and of those the one that leaves last, which has the least time.
    """
    rungs = [0] * len(table)

    def higher(bucket: int) -> int | None:
        now = table[bucket][rungs[bucket]]
        return next((r for r in range(rungs[bucket] + 1, len(table[bucket])) if table[bucket][r] <= WORTH * now), None)

    while stands_out(ready, [row[r] for row, r in zip(table, rungs, strict=True)]) > allowed_s:
        able = [(rungs[b], -b) for b in range(len(table)) if higher(b) is not None]
        if not able:
            break
        bucket = -min(able)[1]
        rungs[bucket] = higher(bucket) or 0
    return rungs


@dataclass
class Adviser:
    """Remembers the rungs, and how often each bucket could have done with less."""

    sizes: list[int]
    ranks: int
    scattered: bool
    rungs: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    tried: tuple[list[int], float] | None = None
    """The rungs before compression was raised last, and what a step took with them."""
    wary: tuple[list[int], int] | None = None
    """Rungs above which steps were slower, and for how many more looks that counts."""

    def __post_init__(self) -> None:
        self.rungs = self.rungs or self.none
        self.idle = list(self.none)

    def begin(self, figures: Figures) -> str | None:
        """Choose before the first step, of which nothing is known; returns why, where something changed."""
        table = costs(figures, self.sizes, self.ranks, self.scattered)
        self.rungs = [FIRST if row[FIRST] <= WORTH * row[0] else 0 for row in table]
        if not any(self.rungs):
            return None
        plain, chosen = (sum(row[r] for row, r in zip(table, some, strict=True)) for some in (self.none, self.rungs))
        return (
            f"{_link(figures)}, uncompressed gradients would travel for {plain:.2f} s, these for {chosen:.2f} s; how "
            "long a step computes is not known yet"
        )

    @property
    def none(self) -> list[int]:
        return [0] * len(self.sizes)

    def look(self, figures: Figures, highest: int = len(LADDER) - 1) -> str | None:
        """Choose again, up to a rung; returns why, where something changed."""
        if (why := self._gone_back(figures.step_s)) is not None:
            return why
        limits = [min(highest, most) for most in self.wary[0]] if self.wary else [highest] * len(self.sizes)
        rows = costs(figures, self.sizes, self.ranks, self.scattered)
        table = [row[: max(most, now) + 1] for row, most, now in zip(rows, limits, self.rungs, strict=True)]
        allowed = STANDS_OUT * max(figures.ready_s)
        need = least(figures.ready_s, table, allowed)
        safe = least(figures.ready_s, table, SPARE * allowed)
        before = list(self.rungs)
        for b, now in enumerate(before):
            self.idle[b] = self.idle[b] + 1 if now > max(need[b], safe[b]) else 0
            if now < need[b]:
                self.rungs[b] = need[b]
            elif self.idle[b] >= PATIENCE:
                self.rungs[b], self.idle[b] = max(need[b], safe[b]), 0
        if self.rungs == before:
            return None
        if any(now > then for now, then in zip(self.rungs, before, strict=True)):
            self.tried = before, figures.step_s
        plain = stands_out(figures.ready_s, [row[0] for row in table])
        chosen = stands_out(figures.ready_s, [row[r] for row, r in zip(table, self.rungs, strict=True)])
        return (
            f"{_link(figures)}, uncompressed gradients would hold up a step of {figures.step_s:.2f} s for "
            f"{max(0, plain):.2f} s; "
            f"these for {max(0, chosen):.2f} s"
        )

    def _gone_back(self, step_s: float) -> str | None:
        """Where steps take longer since compression was raised, the reckoning was wrong: go back, and be wary."""
        if self.wary is not None:
            self.wary = (self.wary[0], self.wary[1] - 1) if self.wary[1] > 1 else None
        if self.tried is None:
            return None
        (before, took), self.tried = self.tried, None
        if step_s <= SLOWER * took:
            return None
        self.rungs, self.idle, self.wary = before, list(self.none), (list(before), WARY)
        return f"a step took {took:.2f} s with less compression and {step_s:.2f} s since"

    def words(self) -> str:
        """The rungs in use, such as `int8 × 3, topk:0.01 × 1`."""
        used = [(LADDER[r], self.rungs.count(r)) for r in sorted(set(self.rungs))]
        return ", ".join(f"{name} × {count}" for name, count in used)


def _link(figures: Figures) -> str:
    return f"at {figures.bytes_per_s * 8e-6:.0f} Mb/s and {figures.latency_s * 1e3:.1f} ms a message"


def measure_link(axis: Axis, device: torch.device) -> tuple[float, float]:
    """Seconds of a message however small, and bytes a second of a rank that sends to all others."""

    def seconds(size: int) -> float:
        message = torch.zeros(max(1, size // (axis.size - 1)), dtype=torch.uint8, device=device)
        began = time.perf_counter()
        axis.start_gather(message)[1].wait()
        _settle(device)
        return time.perf_counter() - began

    seconds(SMALL)  # the first message of a group also connects it
    [small] = agreed([min(seconds(SMALL), seconds(SMALL))], [axis], device)
    size = round(min(LARGE, max(LEAST, SMALL * PROBE_S / small)))
    [large] = agreed([seconds(size)], [axis], device)
    if large < 2 * small and size < LARGE:  # it tells of the latency, or the small one was held up
        size = LARGE
        [large] = agreed([seconds(size)], [axis], device)
    each = max(large - small, 0.3 * large) / (size - SMALL)
    return max(small - SMALL * each, 1e-5), 1 / each


class _Echo:
    """An axis of two of which the other rank says the same, at once."""

    size, rank = 2, 0

    def start_swap(self, shards: Tensor) -> tuple[Tensor, Pending]:
        return shards.flip(0), Done()

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        return torch.cat([tensor, tensor]), Done()


def measure_codes(dice: Dice, device: torch.device) -> list[float]:
    """Seconds for which a number of a bucket keeps the processor busy, by rung: all of a sum but its journeys. The best
    of two, for others may use the machine too."""
    found, echo = [], cast(Axis, _Echo())
    sample = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0)).to(device)
    for rung in LADDER:
        codec = way_of(parse_compression(rung)).gradients
        times = [0.0]
        for _ in range(2 if codec is not None else 0):
            x = sample.clone()
            _settle(device)
            began = time.perf_counter()
            assert codec is not None
            sum_all(echo, codec, x, dice, in_place=True)
            _settle(device)
            times.append(time.perf_counter() - began)
        found.append(min(times[1:], default=0.0) / SAMPLE)
    return found


def agreed(values: list[float], axes: Sequence[Axis], device: torch.device) -> list[float]:
    """The largest of all ranks', each."""
    shared: Tensor = torch.tensor(values, dtype=torch.float64, device=device)
    for axis in axes:
        axis.all_reduce(shared, dist.ReduceOp.MAX)
    return [float(v) for v in shared]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
