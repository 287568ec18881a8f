"""Measured and simulated timeline of one pipelined step, for the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from weft.parallel.pipeline.executor import Pipelined
from weft.planner.schedules.stage_costs import simulated
from weft.training.session import Session

COMPUTE = ("F", "B", "I", "W")


@contextmanager
def recording(session: Session, step: int) -> Iterator[None]:
    """Record the step inside it, if there is a pipeline and this is the job's watch.gantt_step."""
    pipeline = session.state.model
    if step != session.job.watch.gantt_step or not isinstance(pipeline, Pipelined):
        yield
        return
    session.checkpoints.wait()  # a checkpoint that is being written would slow the step
    session.mesh.barrier()  # waiting for a late rank would look like a bubble
    pipeline.spans.wanted = True
    yield
    pipeline.spans.wanted = False
    mine = (session.mesh.coords, pipeline.spans.spans)
    everyone = cast(list[tuple[dict[str, int], list[Any]]], session.mesh.all_gather_json(mine))
    if session.mesh.rank == 0:
        session.run.pipeline.write_text(json.dumps(timeline(session, step, everyone)), encoding="utf-8")


def timeline(session: Session, step: int, everyone: list[tuple[dict[str, int], list[Any]]]) -> dict[str, Any]:
    """The content of the file: one row for each pipeline rank, of the first pipeline."""
    rows = {c["pp"]: spans for c, spans in everyone if not any(i for axis, i in c.items() if axis != "pp")}
    first = min(start for spans in rows.values() for _, _, _, start, _ in spans)
    last = max(end for spans in rows.values() for _, _, _, _, end in spans)
    busy = [(kind, end - start) for spans in rows.values() for kind, _, _, start, end in spans if kind in COMPUTE]
    busy_s = sum(seconds for _, seconds in busy)
    forward = [seconds for kind, seconds in busy if kind == "F"]
    expected = simulated(session.job, session.plan)
    expected_work = sum(s.end - s.start for s in expected.spans if s.kind in COMPUTE)
    unit = busy_s / expected_work if expected_work else sum(forward) / len(forward)
    expected = simulated(session.job, session.plan, unit)
    measured = [
        [rank, kind, stage, microbatch, start - first, end - first]
        for rank, spans in sorted(rows.items())
        for kind, stage, microbatch, start, end in spans
    ]
    return {
        "schedule": session.plan.schedule,
        "simulated": {
            "spans": [[s.rank, s.kind, s.stage, s.microbatch, s.start, s.end] for s in expected.spans],
            "length": expected.length,
            "bubble": expected.bubble,
        },
        "measured": {
            "step": step,
            "spans": measured,
            "length": last - first,
            "bubble": 1 - busy_s / (len(rows) * (last - first)),
        },
    }
