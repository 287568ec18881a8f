"""Traces of a run: records the steps that were asked for on every rank, and joins them into one file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.comm.trace_ranges import StepRanges
from weft.extensions.traces.clocks import clock_offsets
from weft.extensions.traces.merge import RANK_SPANS, RANK_TRACE, merge
from weft.extensions.traces.profiler_events import aligned
from weft.extensions.traces.recorder import StepRecorder, phase_name
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.mesh import Mesh


@dataclass
class TraceRequest:
    """Which steps to trace, and the file for all ranks."""

    at: int
    steps: int
    out: Path


class StepTracer:
    """Follows the loop of a rank. Without a request every call returns at once."""

    def __init__(
        self, run: RunDir, mesh: Mesh, request: TraceRequest | None, announce: Callable[[], None], nvtx: bool = False
    ) -> None:
        """`announce` is called before work that takes seconds, so that it is not mistaken for a hang. With `nvtx` the
        phases of every step are NVTX ranges."""
        self.run, self.mesh, self.request, self.announce = run, mesh, request, announce
        self.recorder: StepRecorder | None = None
        self.nvtx = StepRanges(nvtx=True, profiled=False) if nvtx and mesh.device.type == "cuda" else None
        mesh.meter.ranges = self.nvtx
        self.recording = self.done = False
        self.next = 0

    def boundary(self, completed: int) -> None:
        """Called where the time of a step ends and that of the next begins; all ranks call it with the same steps."""
        request, recorder, following = self.request, self.recorder, completed + 1
        if request is None:
            return
        now = time.perf_counter()
        if self.recording and recorder is not None:
            if following == self.next:  # the clock was started again, after an evaluation
                recorder.restart_step(following, now)
            elif following != self.next + 1:  # a roll-back
                recorder.discard()
                self.recorder, self.recording = None, False
            elif following == request.at + request.steps:
                recorder.end(now)
                self.mesh.meter.ranges = self.nvtx
                self.recording, self.done = False, True
            else:
                recorder.next_step(following, now)
        if following == request.at and not self.recording and not self.done:
            if self.recorder is None:
                self._prepare()
            assert self.recorder is not None
            if self.nvtx is not None:
                self.nvtx.close_all()
            self.recorder.begin(following, now)
            self.recording = True
        self.next = following

    def phase(self, name: str) -> None:
        """A phase of the loop begins."""
        if self.recording and self.recorder is not None:
            self.recorder.phase(name)
        elif self.nvtx is not None:
            self.nvtx.close_all()
            self.nvtx.open(phase_name(name))

    def between_steps(self) -> bool:
        """Start the profiler, or write the files, when it is time. Returns whether that took time."""
        if self.request is None:
            return False
        if self.done:
            self.write()
            return True
        if self.next == self.request.at - 1 and self.recorder is None:
            self._prepare()
            return True
        return False

    def _prepare(self) -> None:
        self.announce()
        self.recorder = StepRecorder(self.mesh)
        self.recorder.prepare()

    def write(self) -> dict[str, Any] | None:
        """Write the traces of all ranks, and on rank 0 the joined file. Returns its summary there."""
        assert self.recorder is not None and self.request is not None
        self.announce()
        recorder, request = self.recorder, self.request
        self.recorder, self.request, self.done = None, None, False
        folder = self.run.traces
        folder.mkdir(parents=True, exist_ok=True)
        offsets, error = clock_offsets(self.mesh)
        path = folder / RANK_TRACE.format(rank=self.mesh.rank)
        recorder.export(path)
        mine = recorder.rank_trace(aligned(json.loads(path.read_text(encoding="utf-8", errors="replace"))))
        spans = folder / RANK_SPANS.format(rank=self.mesh.rank)
        spans.write_text(json.dumps(mine.to_json()), encoding="utf-8")
        self.mesh.barrier()
        return merge(folder, request.out, offsets, error) if self.mesh.rank == 0 else None


def tracer_of_job(job: Job, run: RunDir, mesh: Mesh, announce: Callable[[], None]) -> StepTracer:
    """The tracer of the steps of `watch.trace`; without it only the NVTX ranges of `watch.nvtx`."""
    asked = job.watch.trace
    request = None
    if asked is not None:
        file = f"steps-{asked.at}-{asked.at + asked.steps - 1}.json"
        request = TraceRequest(asked.at, asked.steps, run.traces / file)
    return StepTracer(run, mesh, request, announce, job.watch.nvtx)
