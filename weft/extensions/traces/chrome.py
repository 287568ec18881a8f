"""One Chrome trace of all ranks, which Perfetto, chrome://tracing and other viewers open."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from weft.extensions.traces.breakdown import RankTrace
from weft.job.errors import check_output_file
from weft.watch.profiler_trace import COLLECTIVE_NAME

Event = dict[str, Any]

STEPS, PARTS, STAGES, COPIES, MESSAGES, THREADS, STREAMS = 1, 2, 10, 40, 50, 200, 500
"""Thread numbers of the lanes of a rank: steps with their phases, parts of the time, pipeline stages from 10 on,
copies, communication from 50 on, then the profiler's host threads and GPU streams."""
COLOURS = {
    "compute": "good", "exposed communication": "terrible", "bubble": "yellow", "idle": "grey", "data": "bad",
    "host": "olive",
}  # fmt: skip
"""Chrome's colour names; Perfetto chooses its own."""
MAX_OVERLAPS, ROUNDING_US = 8, 1.0
"""Lanes of a thread whose events overlap, and microseconds by which an event may end after the one around it."""
GAP_S = 2e-9
"""Between parts: viewers cut times to whole nanoseconds and would drop a part that begins before the last one ends."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


def rank_events(
    rank: RankTrace, parts: Sequence[tuple[str, float, float]], profiled: Iterable[Event], origin: float
) -> Iterator[Event]:
    """The events of one rank. Times are in seconds of one clock; `origin` becomes 0."""

    def event(name: str, category: str, lane: int, start: float, end: float, **more: Any) -> Event:
        begin, stop = _micros(start - origin), _micros(max(start, end) - origin)
        return {
            "ph": "X", "name": name, "cat": category, "pid": rank.rank, "tid": lane, "ts": begin,
            "dur": round(stop - begin, 3), **more,
        }  # fmt: skip

    place = f" ({rank.position})" if rank.position not in ("", "alone") else ""
    yield _meta("process_name", rank.rank, None, {"name": f"rank {rank.rank}{place}"})
    yield _meta("process_sort_index", rank.rank, None, {"sort_index": rank.rank})
    lanes = {STEPS: "steps", PARTS: "parts of the time"}
    for number, start, end in rank.steps:
        yield event(f"step {number}", "step", STEPS, start, end)
    for name, start, end in rank.phases:
        yield event(name, "phase", STEPS, start, end)
    for name, start, end in parts:
        yield event(name, "part", PARTS, start, end - GAP_S, cname=COLOURS[name])
    for name, start, end in rank.stages:
        stage, action = name.split(" ", 1)
        lanes[STAGES + int(stage)] = f"pipeline stage {stage}"
        yield event(action, "pipeline", STAGES + int(stage), start, end, args={"stage": int(stage)})
    for name, start, end in rank.copies:
        lanes[COPIES] = "copies"
        yield event(name, "copy", COPIES, start, end)
    exposed = [(a, b) for name, a, b in parts if name in ("exposed communication", "bubble", "idle")]
    for lane, (message, title) in _without_overlap(rank, MESSAGES):
        lanes[lane] = title
        shown = sum(max(0.0, min(b, message.end) - max(a, message.start)) for a, b in exposed)
        whole = message.end - message.start
        mark = " (exposed)" if whole > 0 and shown > whole / 2 else ""
        args = {"axis": message.axis, "bytes": message.bytes, "exposed_us": _micros(shown)}
        yield event(message.what + mark, "communication", lane, message.start, message.end, args=args)
    yield from _profiler_events(rank.rank, profiled, origin, lanes)
    for lane, title in sorted(lanes.items()):
        yield _meta("thread_name", rank.rank, lane, {"name": title})
        yield _meta("thread_sort_index", rank.rank, lane, {"sort_index": lane})


def _profiler_events(rank: int, profiled: Iterable[Event], origin: float, lanes: dict[int, str]) -> Iterator[Event]:
    """Operators and kernels by thread and stream. Those that overlap another without being inside it get a lane of
    their own: viewers would drop them."""
    threads: dict[Any, int] = {}
    ends: dict[int, list[float]] = {}
    shown = (e for e in profiled if not COLLECTIVE_NAME.match(e["name"]))  # collectives have their own lanes
    for each in sorted(shown, key=lambda e: (e["ts"], -e["dur"])):
        start = _micros(each["ts"] - origin)
        end = start + _micros(each["dur"])
        for overflow in range(MAX_OVERLAPS):
            device = each.get("cat") in ON_DEVICE
            key = (device, each.get("pid"), each.get("tid"), overflow)
            if key not in threads:
                threads[key] = (STREAMS if device else THREADS) + sum(k[0] == device for k in threads)
                lanes[threads[key]] = f"GPU stream {each.get('tid')}" if device else f"thread {each.get('tid')}"
            lane = threads[key]
            held = ends[lane] = [e for e in ends.get(lane, ()) if e > start]
            if not held or end <= held[-1] + ROUNDING_US:
                break
        end = min(end, held[-1]) if held else end
        held.append(end)
        kept: Event = {k: each[k] for k in ("name", "cat", "args") if k in each}
        yield {"ph": "X", **kept, "pid": rank, "tid": lane, "ts": start, "dur": round(end - start, 3)}


def _without_overlap(rank: RankTrace, first: int) -> Iterator[tuple[int, tuple[Any, str]]]:
    """Messages with a lane each: one lane an axis, more where messages of an axis overlap."""
    lane = first
    for axis in sorted({m.axis for m in rank.messages}):
        free: list[float] = []
        for message in sorted((m for m in rank.messages if m.axis == axis), key=lambda m: m.start):
            at = next((i for i, end in enumerate(free) if end <= message.start), len(free))
            free[at : at + 1] = [message.end]
            yield lane + at, (message, f"communication {axis}")
        lane += len(free)


def _meta(kind: str, rank: int, lane: int | None, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, **({} if lane is None else {"tid": lane}), "args": dict(args)}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _opened(path: Path, compressed: bool) -> TextIO:
    return io.TextIOWrapper(gzip.open(path, "wb"), encoding="utf-8") if compressed else path.open("w", encoding="utf-8")


def write_trace(path: Path, events: Iterable[Event], about: Mapping[str, Any]) -> None:
    """Write the file, compressed if its name ends in .gz. It appears under its name when it is complete."""
    check_output_file(path, "the trace", "trace.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with _opened(partial, path.suffix == ".gz") as out:
        out.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(about, separators=(",", ":")))
        out.write(',"traceEvents":[')
        for i, event in enumerate(events):
            out.write(("," if i else "") + "\n" + json.dumps(event, separators=(",", ":"), default=str))
        out.write("\n]}\n")
    partial.replace(path)
