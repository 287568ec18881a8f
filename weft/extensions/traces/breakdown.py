"""Divides the time of traced steps among compute, exposed communication, bubble, idle, data and host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.extensions.traces.intervals import Span, difference, intersection, partition, union

PARTS = ("compute", "exposed communication", "bubble", "idle", "data", "host")
"""compute: operators (on a GPU: kernels). exposed communication: waiting for messages while nothing is computed.
bubble: a pipeline stage waiting for its neighbours. idle: waiting for ranks that have not reached a collective yet, and
a GPU without work for other reasons. data: waiting for a batch, and copies that nothing overlaps. host: Python and
launches."""

PIPELINE = "pp"
DATA_PHASE = "weft.data"


@dataclass(frozen=True)
class Sent:
    """A message of a rank: axis, collective, bytes, start and end."""

    axis: str
    what: str
    bytes: int
    start: float
    end: float


@dataclass
class RankTrace:
    """What a rank recorded of traced steps, in seconds of one clock."""

    rank: int
    position: str
    steps: list[tuple[int, float, float]]
    """Number, start and end of each step."""
    phases: list[tuple[str, float, float]]
    stages: list[tuple[str, float, float]]
    """Actions of a pipeline, such as `1 F 3`: stage 1, forward pass of microbatch 3."""
    waits: list[tuple[str, float, float]]
    """Waits of the training thread for other ranks, by axis. On a GPU empty: kernels wait there."""
    messages: list[Sent]
    busy: list[Span]
    """Union of operators on the training thread; on a GPU, of kernels that are not communication."""
    copies: list[tuple[str, float, float]] = field(default_factory=list)
    blocked: list[Span] = field(default_factory=list)
    """On a GPU: when the host waited for the device."""
    cuda: bool = False
    groups: dict[str, list[int]] = field(default_factory=dict)
    """The ranks of each axis of this rank."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "messages": [list(vars(m).values()) for m in self.messages]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RankTrace:
        def tuples(rows: Sequence[Sequence[Any]]) -> list[Any]:
            return [tuple(row) for row in rows]

        lists = {k: tuples(raw[k]) for k in ("steps", "phases", "stages", "waits", "busy", "copies", "blocked")}
        return cls(**{**raw, **lists, "messages": [Sent(*row) for row in raw["messages"]]})

    def shifted(self, by: float) -> RankTrace:
        """The same on another clock."""

        def move(rows: Sequence[tuple[Any, ...]]) -> list[Any]:
            return [(*row[:-2], row[-2] + by, row[-1] + by) for row in rows]

        lists = {k: move(getattr(self, k)) for k in ("steps", "phases", "stages", "waits", "busy", "copies", "blocked")}
        sent = [Sent(m.axis, m.what, m.bytes, m.start + by, m.end + by) for m in self.messages]
        return RankTrace(**{**vars(self), **lists, "messages": sent})


def late_arrivals(ranks: Mapping[int, RankTrace]) -> dict[int, list[Span]]:
    """For each rank, when it waited in a collective that another rank had not started. Matches the n-th messages of a
    group; a group whose ranks recorded different numbers is left out."""
    out: dict[int, list[Span]] = {rank: [] for rank in ranks}
    groups = {(axis, tuple(members)) for r in ranks.values() for axis, members in r.groups.items() if axis != PIPELINE}
    for axis, members in sorted(groups):
        if any(rank not in ranks for rank in members):
            continue
        sent = [sorted((m for m in ranks[rank].messages if m.axis == axis), key=lambda m: m.start) for rank in members]
        if len({len(messages) for messages in sent}) != 1:
            continue
        for same in zip(*sent, strict=True):
            last = max(message.start for message in same)
            for rank, message in zip(members, same, strict=True):
                out[rank].append((message.start, min(last, message.end)))
    return {rank: union(spans) for rank, spans in out.items()}


def divide(rank: RankTrace, late: Sequence[Span]) -> list[tuple[str, float, float]]:
    """The parts of the traced steps of a rank, in order of time."""
    layers = _gpu_layers(rank, late) if rank.cuda else _cpu_layers(rank, late)
    return [span for _, start, end in rank.steps for span in partition((start, end), layers, "host")]


def _cpu_layers(rank: RankTrace, late: Sequence[Span]) -> list[tuple[str, Sequence[Span]]]:
    """On a CPU the training thread does one thing at a time."""
    bubble = union((a, b) for axis, a, b in rank.waits if axis == PIPELINE)
    waits = union((a, b) for axis, a, b in rank.waits if axis != PIPELINE)
    data = [(a, b) for name, a, b in rank.phases if name == DATA_PHASE]
    return [
        ("bubble", bubble), ("idle", intersection(waits, late)), ("exposed communication", waits), ("data", data),
        ("compute", rank.busy),
    ]  # fmt: skip


def _gpu_layers(rank: RankTrace, late: Sequence[Span]) -> list[tuple[str, Sequence[Span]]]:
    """On a GPU compute comes first: what overlaps it costs nothing. Gaps are the host's unless it waits itself."""
    sent = union((m.start, m.end) for m in rank.messages if m.axis != PIPELINE)
    data = [(a, b) for name, a, b in rank.phases if name == DATA_PHASE]
    return [
        ("compute", rank.busy), ("bubble", [(m.start, m.end) for m in rank.messages if m.axis == PIPELINE]),
        ("idle", intersection(sent, late)), ("exposed communication", sent),
        ("data", [(a, b) for _, a, b in rank.copies]), ("data", difference(union(data), union(rank.blocked))),
        ("idle", rank.blocked),
    ]  # fmt: skip


def summarise(rank: RankTrace, parts: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Milliseconds of a step by part, and messages by axis: their bytes, time, and the time that was exposed."""
    count = len(rank.steps)
    total = {part: sum(b - a for name, a, b in parts if name == part) * 1e3 / count for part in PARTS}
    exposed = union((a, b) for name, a, b in parts if name in ("exposed communication", "bubble", "idle"))
    axes: dict[str, dict[str, float]] = {}
    for axis in sorted({m.axis for m in rank.messages}):
        mine = [m for m in rank.messages if m.axis == axis]
        time = union((m.start, m.end) for m in mine)
        axes[axis] = {
            "messages": len(mine) / count, "mib": sum(m.bytes for m in mine) / 2**20 / count,
            "ms": sum(b - a for a, b in time) * 1e3 / count,
            "exposed_ms": sum(b - a for a, b in intersection(time, exposed)) * 1e3 / count,
        }  # fmt: skip
    step_ms = sum(end - start for _, start, end in rank.steps) * 1e3 / count
    return {"rank": rank.rank, "position": rank.position, "step_ms": step_ms, "parts_ms": total, "axes": axes}
