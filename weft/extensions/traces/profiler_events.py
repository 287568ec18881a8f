"""The profiler's events on the clock of the process that recorded them. Does not import torch."""

from __future__ import annotations

from typing import Any

from weft.extensions.traces.intervals import Span

CLOCK = "weft.clock"
"""Marks that hold the process's clock, to convert the profiler's times."""


def event_span(event: dict[str, Any]) -> Span:
    start = float(event["ts"])
    return start, start + float(event.get("dur") or 0.0)


def is_message(event: dict[str, Any]) -> bool:
    """Whether a kernel is communication."""
    return "nccl" in event["name"].lower()


def aligned(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The profiler's complete events, with `ts` and `dur` in seconds of the clock of the marks; marks are left out."""
    events = [e for e in raw.get("traceEvents", ()) if e.get("ph") == "X" and isinstance(e.get("name"), str)]
    marks = [e for e in events if e["name"].startswith(CLOCK)]
    # a mark starts a little after its clock was read: the smallest difference is the best
    ahead = min(float(e["ts"]) / 1e6 - int(e["name"].split()[1]) / 1e9 for e in marks)
    kept = [e for e in events if not e["name"].startswith(CLOCK) and e.get("cat") != "Trace"]
    return [{**e, "ts": float(e["ts"]) / 1e6 - ahead, "dur": float(e.get("dur") or 0) / 1e6} for e in kept]
