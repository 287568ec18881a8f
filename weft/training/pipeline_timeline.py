"""The measured picture of one pipelined step, beside the simulated one, for the report."""

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
def recorded(session: Session, step: int) -> Iterator[None]:
    """Record what happens inside, if this is the step the job wants drawn and there is a pipeline."""
    pipeline = session.state.model
    if step != session.job.watch.gantt_step or not isinstance(pipeline, Pipelined):
        yield
        return
    session.checkpoints.wait()  # one being written would disturb the picture
    session.mesh.barrier()  # or the wait for a late rank would look like a bubble
    pipeline.spans.wanted = True
    yield
    pipeline.spans.wanted = False
    mine = (session.mesh.coords, pipeline.spans.spans)
    everyone = cast(list[tuple[dict[str, int], list[Any]]], session.mesh.all_gather_json(mine))
    if session.mesh.rank == 0:
        session.run.pipeline.write_text(json.dumps(picture(session, step, everyone)), encoding="utf-8")


def picture(session: Session, step: int, everyone: list[tuple[dict[str, int], list[Any]]]) -> dict[str, Any]:
    """One row a stage rank, of the first of the pipelines that run side by side."""
    rows = {c["pp"]: spans for c, spans in everyone if not any(i for axis, i in c.items() if axis != "pp")}
    began = min(start for spans in rows.values() for _, _, _, start, _ in spans)
    ended = max(end for spans in rows.values() for _, _, _, _, end in spans)
    busy = [(kind, end - start) for spans in rows.values() for kind, _, _, start, end in spans if kind in COMPUTE]
    spent = sum(seconds for _, seconds in busy)
    forward = [seconds for kind, seconds in busy if kind == "F"]
    promised = simulated(session.job, session.plan)
    promised_work = sum(s.end - s.start for s in promised.spans if s.kind in COMPUTE)
    unit = spent / promised_work if promised_work else sum(forward) / len(forward)
    promised = simulated(session.job, session.plan, unit)
    measured = [
        [rank, kind, stage, microbatch, start - began, end - began]
        for rank, spans in sorted(rows.items())
        for kind, stage, microbatch, start, end in spans
    ]
    return {
        "schedule": session.plan.schedule,
        "simulated": {
            "spans": [[s.rank, s.kind, s.stage, s.microbatch, s.start, s.end] for s in promised.spans],
            "length": promised.length,
            "bubble": promised.bubble,
        },
        "measured": {
            "step": step,
            "spans": measured,
            "length": ended - began,
            "bubble": 1 - spent / (len(rows) * (ended - began)),
        },
    }
