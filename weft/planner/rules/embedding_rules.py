"""Rules of embedding tables."""

from __future__ import annotations

from weft.job.schema import Job
from weft.planner.plan import Plan


def tables_rule(job: Job, plan: Plan) -> str | None:
    """Tables are spread over ranks with different samples, which synchronise every step."""
    if not job.model.tables:
        return None
    for axis in ("tp", "cp", "pp"):
        if (degree := getattr(plan, axis)) > 1:
            return (
                f"model.tables are spread over data-parallel ranks, and parallel.{axis}={degree}; {axis}=1 with "
                "dp_replicate or dp_shard would work"
            )
    if job.train.sync.mode != "step":
        return f"model.tables are on one rank each, and train.sync={job.train.sync.mode} trains copies; sync=step works"
    if job.train.ema:
        return (
            f"train.ema={job.train.ema:g} averages weights of every step, and model.tables change by rows; ema=0 works"
        )
    cached = [t.name for t in job.model.tables if t.cache_rows is not None and t.home == "device"]
    if cached:
        return f"model.tables: cache_rows of {cached[0]} has no effect with home: device; home: host would work"
    return None
