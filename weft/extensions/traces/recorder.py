"""Records some steps of this rank: the profiler's trace, named ranges, and messages by axis."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from weft.comm.timeline import CommTimeline
from weft.comm.trace_ranges import COMM, RangeSpan, StepRanges
from weft.extensions.traces.breakdown import PIPELINE, RankTrace, Sent
from weft.extensions.traces.intervals import Span, union
from weft.extensions.traces.profiler_events import CLOCK, event_span, is_message
from weft.mesh import Mesh
from weft.watch.kernel_classes import HOST
from weft.watch.profiler_trace import COLLECTIVE_NAME

CLOCK_MARKS = 5
STEP = "ProfilerStep#"
"""Prefix of the range of a step, as TensorBoard's profiler expects it."""
PHASES = {"data": "weft.data", "compute": "weft.gradients", "update": "weft.update"}
"""Ranges by the phases of the training loop; other phases are `weft.PHASE`."""
HOST_BLOCKED = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


def phase_name(phase: str) -> str:
    """The range of a phase of the loop."""
    return PHASES.get(phase, f"weft.{phase}")


class StepRecorder:
    """The profiler and ranges of this rank from begin() to end(); next_step() and phase() are called by the loop."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.cuda = mesh, mesh.device.type == "cuda"
        self.ranges = StepRanges(nvtx=self.cuda)
        self.timeline = CommTimeline(torch.device("cpu"))  # on a GPU messages are kernels
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints lines of its own
        self.profiler = profile(activities=kinds)
        self.steps: list[tuple[int, float, float]] = []
        self._step: tuple[int, float] | None = None

    def prepare(self) -> None:
        """Start the profiler, which is slow the first time, before the steps that are recorded."""
        self.profiler.start()
        self._mark_clock()

    def begin(self, step: int, now: float) -> None:
        """Record from now on: `step` began at `now`."""
        if self.cuda:
            torch.cuda.synchronize(self.mesh.device)
        meter = self.mesh.meter
        meter.ranges = self.ranges
        if not self.cuda:
            meter.timeline = self.timeline
        self._open_step(step, now)

    def _open_step(self, step: int, now: float) -> None:
        self._step = (step, now)
        self.ranges.open(f"{STEP}{step}")
        self.ranges.open("weft.figures")

    def phase(self, name: str) -> None:
        """A phase of the loop begins, and the one before ends."""
        self.ranges.close()
        self.ranges.open(phase_name(name))

    def next_step(self, step: int, now: float) -> None:
        """`step` begins, and the one before ends."""
        self._close_step(now)
        self._open_step(step, now)

    def restart_step(self, step: int, now: float) -> None:
        """The clock of `step` starts again; what was before belongs to no step."""
        self.ranges.close_all()
        self._open_step(step, now)

    def _close_step(self, now: float) -> None:
        assert self._step is not None
        self.ranges.close_all()
        self.steps.append((*self._step, now))

    def end(self, now: float) -> None:
        """Stop recording at the end of a step. A GPU may still compute it."""
        if self.cuda:
            torch.cuda.synchronize(self.mesh.device)
            now = time.perf_counter()
        self._close_step(now)
        self.mesh.meter.ranges = self.mesh.meter.timeline = None
        self._mark_clock()
        self.profiler.stop()

    def discard(self) -> None:
        """Stop without a result."""
        self.ranges.close_all()
        self.mesh.meter.ranges = self.mesh.meter.timeline = None
        self.profiler.stop()

    def _mark_clock(self) -> None:
        for _ in range(CLOCK_MARKS):
            with record_function(f"{CLOCK} {time.perf_counter_ns()}"):
                pass

    def export(self, path: Path) -> None:
        """Write the profiler's trace."""
        self.profiler.export_chrome_trace(str(path))

    def rank_trace(self, events: list[dict[str, Any]]) -> RankTrace:
        """What was recorded, with the profiler's events in seconds of this process's clock (see `aligned`)."""
        groups = {axis.name: torch.distributed.get_process_group_ranks(axis.group) for axis in self.mesh.every_axis()}
        names = {str(axis.group.group_name): axis.name for axis in self.mesh.every_axis()}
        spans = self.ranges.spans
        waits = [] if self.cuda else [(s.name.split()[1], s.start, s.end) for s in spans if s.name.startswith(COMM)]
        return RankTrace(
            self.mesh.rank, self.mesh.position, self.steps,
            [p for s in spans if s.name.startswith("weft.") and not _is_inner(s.name) for p in self._clipped(s)],
            [(s.name.removeprefix("weft.stage "), s.start, s.end) for s in spans if s.name.startswith("weft.stage")],
            waits, _kernel_messages(events, names) if self.cuda else self._messages(), self._busy(events),
            [(e["name"], *event_span(e)) for e in events if e.get("cat") == "gpu_memcpy"],
            union(event_span(e) for e in events if e["name"] in HOST_BLOCKED), self.cuda, groups,
        )  # fmt: skip

    def _clipped(self, phase: RangeSpan) -> list[tuple[str, float, float]]:
        """A phase inside its step, whose clock was read a moment before or after."""
        for _, start, end in self.steps:
            if start <= (phase.start + phase.end) / 2 <= end:
                return [(phase.name, max(start, phase.start), min(end, phase.end))]
        return []

    def _messages(self) -> list[Sent]:
        return [Sent(m.axis, m.what, m.bytes, m.start, m.end) for m in self.timeline.messages]

    def _busy(self, events: list[dict[str, Any]]) -> list[Span]:
        if self.cuda:
            return union(
                event_span(e) for e in events if e.get("cat") in ("kernel", "gpu_memset") and not is_message(e)
            )
        marks = [e for e in events if e["name"].startswith(STEP)]
        thread = marks[0]["tid"] if marks else None
        ops = [e for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread]
        return union(event_span(e) for e in ops if not COLLECTIVE_NAME.match(e["name"]) and not _is_wrapper(e["name"]))


def _is_inner(name: str) -> bool:
    return name.startswith((COMM, "weft.stage"))


def _is_wrapper(name: str) -> bool:
    """Whether an operator of a CPU only calls others: its own time is Python's."""
    return bool(HOST.search(name))


def _kernel_messages(events: list[dict[str, Any]], axes: dict[str, str]) -> list[Sent]:
    out = []
    for event in events:
        if event.get("cat") == "kernel" and is_message(event):
            args = event.get("args") or {}
            axis = axes.get(str(args.get("Process Group Name")), "other")
            size = int(args.get("In msg nelems") or 0) * ELEMENT_BYTES.get(str(args.get("dtype")), 0)
            what = str(args.get("Collective name") or event["name"])
            out.append(Sent(PIPELINE if axis == PIPELINE else axis, what, size, *event_span(event)))
    return out


ELEMENT_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Char": 1}
