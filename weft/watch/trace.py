"""A profiler's trace, read: which work the device did when, and from which operators it was launched."""

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
FLYING = re.compile(r"^(gloo|nccl|ucc|mpi|xccl):")
"""A process group's record of a message: begun by one thread and ended by another, so it nests in nothing."""
MARK = "weft."
"""Ranges that Weft opens around the parts of a step begin with this."""


@dataclass
class Event:
    """Something with a beginning and an end, in microseconds; on a host thread, with what it was called from."""

    name: str
    kind: str
    start: float
    end: float
    thread: Any = None
    dims: tuple[tuple[int, ...], ...] = ()
    """Shapes of the operator's tensors, lists of tensors laid flat."""
    types: tuple[str, ...] = ()
    correlation: int | None = None
    parent: Event | None = field(default=None, repr=False)
    inside: float = 0.0
    """Of its time, what its children take."""
    leaf: bool = True

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def own(self) -> float:
        """Time in it that is in none of its children."""
        return max(0.0, self.length - self.inside)

    def stack(self) -> list[str]:
        """Its own name and those it was called from, innermost first."""
        names, at = [], self
        while True:
            names.append(at.name)
            if at.parent is None:
                return names
            at = at.parent


@dataclass(frozen=True)
class Trace:
    """Host events, nested thread by thread, and device events, each with the host event that launched it."""

    host: list[Event]
    device: list[tuple[Event, Event | None]]
    marks: list[Event]
    """Weft's own ranges, in time."""
    messages: list[Event] = field(default_factory=list)
    """Collectives from their start to their end, which other work may overlap on any thread."""

    @property
    def window(self) -> tuple[float, float]:
        """When the steps began and ended."""
        whole = [m for m in self.marks if m.name == "weft.window"]
        spans = whole or self.host
        return min(e.start for e in spans), max(e.end for e in spans)

    def marks_at(self, time: float) -> list[str]:
        """Names of Weft's ranges that are open at a time, innermost first, whichever thread asks."""
        return [m.name for m in reversed(self.marks) if m.start <= time < m.end]


def read_trace(path: Path) -> Trace:
    """The trace that torch.profiler exported (Chrome's format)."""
    raw = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return parse_trace(raw["traceEvents"])


def parse_trace(raw: Iterable[dict[str, Any]]) -> Trace:
    events = [_event(r) for r in raw if r.get("ph") == "X" and r.get("cat") in (*ON_HOST, *ON_DEVICE)]
    messages = [e for e in events if e.kind in ON_HOST and FLYING.match(e.name)]
    host = nest([e for e in events if e.kind in ON_HOST and not FLYING.match(e.name)])
    by_correlation: dict[int | None, Event] = {e.correlation: e for e in host if e.correlation is not None}
    device = sorted((e for e in events if e.kind in ON_DEVICE), key=lambda e: e.start)
    marks = sorted((e for e in host if e.name.startswith(MARK)), key=lambda e: (e.start, -e.end))
    return Trace(host, [(e, by_correlation.get(e.correlation)) for e in device], marks, messages)


def _event(raw: dict[str, Any]) -> Event:
    args = raw.get("args") or {}
    start = float(raw["ts"])
    dims, types = _flat(args.get("Input Dims") or (), args.get("Input type") or ())
    launched = raw["cat"] in (*LAUNCHES, *ON_DEVICE)
    return Event(
        str(raw["name"]), raw["cat"], start, start + float(raw.get("dur") or 0.0), (raw.get("pid"), raw.get("tid")),
        dims, types, args.get("correlation") if launched else None,
    )  # fmt: skip


def _flat(dims: Sequence[Any], types: Sequence[str]) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Shapes and types one by one; a list of tensors does not say its type, and keeps the word TensorList."""
    shapes: list[tuple[int, ...]] = []
    names: list[str] = []
    for shape, name in zip(dims, types, strict=False):
        each = shape if shape and isinstance(shape[0], list) else [shape]
        shapes += [tuple(int(n) for n in s) for s in each]
        names += [name] * len(each)
    return tuple(shapes), tuple(names)


def nest(events: list[Event]) -> list[Event]:
    """Tell each event its parent on its thread. Sorted by beginning; of two that begin together the longer holds."""
    events.sort(key=lambda e: (e.start, -e.end))
    open_on: dict[Any, list[Event]] = {}
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
    """The union of some spans of time, in order."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > start:
            out.append((start, end))
    return out


def overlap(covered: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """How much of start … end lies in a union made by cover()."""
    first = max(0, bisect_right(covered, (start, float("inf"))) - 1)
    total = 0.0
    for a, b in covered[first:]:
        if a >= end:
            break
        total += max(0.0, min(b, end) - max(a, start))
    return total
