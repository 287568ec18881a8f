"""Read a profiler trace: what the device did when, and which operators launched it."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
ON_HOST = ("cpu_op", "user_annotation", *LAUNCHES)
COLLECTIVE_NAME = re.compile(r"^(gloo|nccl|ucc|mpi|xccl):")
"""A process group's record of a collective, which starts and ends on different threads and so does not nest."""
MARK = "weft."
"""Prefix of the ranges that Weft opens around the parts of a step."""


@dataclass
class TraceEvent:
    """An interval in microseconds; on a host thread, with the event that it was called from."""

    name: str
    kind: str
    start: float
    end: float
    thread: Any = None
    dims: tuple[tuple[int, ...], ...] = ()
    """Shapes of the operator's tensors, with lists of tensors flattened."""
    types: tuple[str, ...] = ()
    correlation: int | None = None
    parent: TraceEvent | None = field(default=None, repr=False)
    inside: float = 0.0
    """Time of its children."""
    leaf: bool = True

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def own(self) -> float:
        """Time outside its children."""
        return max(0.0, self.length - self.inside)

    def stack(self) -> list[str]:
        """Its name and those of its callers, innermost first."""
        names, at = [], self
        while True:
            names.append(at.name)
            if at.parent is None:
                return names
            at = at.parent


@dataclass(frozen=True)
class ProfilerTrace:
    """Host events, nested by thread, and device events with the host event that launched each."""

    host: list[TraceEvent]
    device: list[tuple[TraceEvent, TraceEvent | None]]
    marks: list[TraceEvent]
    """Weft's own ranges, by start time."""
    messages: list[TraceEvent] = field(default_factory=list)
    """Collectives from start to end; work on any thread may overlap them."""

    @property
    def window(self) -> tuple[float, float]:
        """Start and end of the steps."""
        whole = [m for m in self.marks if m.name == "weft.window"]
        spans = whole or self.host
        return min(e.start for e in spans), max(e.end for e in spans)

    def marks_at(self, time: float) -> list[str]:
        """Names of Weft's ranges that are open at a time, innermost first, on any thread."""
        return [m.name for m in reversed(self.marks) if m.start <= time < m.end]


def read_trace(path: Path) -> ProfilerTrace:
    """Read a trace exported by torch.profiler (Chrome's format)."""
    raw = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return parse_trace(raw["traceEvents"])


def parse_trace(raw: Iterable[dict[str, Any]]) -> ProfilerTrace:
    events = [_event(r) for r in raw if r.get("ph") == "X" and r.get("cat") in (*ON_HOST, *ON_DEVICE)]
    messages = [e for e in events if e.kind in ON_HOST and COLLECTIVE_NAME.match(e.name)]
    host = nest([e for e in events if e.kind in ON_HOST and not COLLECTIVE_NAME.match(e.name)])
    by_correlation: dict[int | None, TraceEvent] = {e.correlation: e for e in host if e.correlation is not None}
    device = sorted((e for e in events if e.kind in ON_DEVICE), key=lambda e: e.start)
    marks = sorted((e for e in host if e.name.startswith(MARK)), key=lambda e: (e.start, -e.end))
    return ProfilerTrace(host, [(e, by_correlation.get(e.correlation)) for e in device], marks, messages)


def _event(raw: dict[str, Any]) -> TraceEvent:
    args = raw.get("args") or {}
    start = float(raw["ts"])
    dims, types = _flat(args.get("Input Dims") or (), args.get("Input type") or ())
    launched = raw["cat"] in (*LAUNCHES, *ON_DEVICE)
    return TraceEvent(
        str(raw["name"]), raw["cat"], start, start + float(raw.get("dur") or 0.0), (raw.get("pid"), raw.get("tid")),
        dims, types, args.get("correlation") if launched else None,
    )  # fmt: skip


def _flat(dims: Sequence[Any], types: Sequence[str]) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Shapes and types, flattened; tensors in a list keep the type TensorList."""
    shapes: list[tuple[int, ...]] = []
    names: list[str] = []
    for shape, name in zip(dims, types, strict=False):
        each = shape if shape and isinstance(shape[0], list) else [shape]
        shapes += [tuple(int(n) for n in s) for s in each]
        names += [name] * len(each)
    return tuple(shapes), tuple(names)


def nest(events: list[TraceEvent]) -> list[TraceEvent]:
    """Set the parent of each event on its thread. Of two events that start together the longer is the parent."""
    events.sort(key=lambda e: (e.start, -e.end))
    open_on: dict[Any, list[TraceEvent]] = {}
    for event in events:
        stack = open_on.setdefault(event.thread, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack and event.end <= stack[-1].end + 1e-3:
            event.parent = stack[-1]
            stack[-1].inside += event.length
            stack[-1].leaf = False
        stack.append(event)
    return events


def cover(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of some intervals, in order."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > start:
            out.append((start, end))
    return out


def overlap(covered: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Length of [start, end] inside a union made by cover()."""
    first = max(0, bisect_right(covered, (start, float("inf"))) - 1)
    total = 0.0
    for a, b in covered[first:]:
        if a >= end:
            break
        total += max(0.0, min(b, end) - max(a, start))
    return total
