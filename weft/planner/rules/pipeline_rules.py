"""Rules of pipeline parallelism."""

from __future__ import annotations

from weft.job.schema import Job
from weft.planner.plan import Plan


def pipeline_rule(job: Job, plan: Plan) -> str | None:
    """Pipeline settings need pp > 1: without a pipeline they would have no effect."""
    if job.parallel == "auto" or plan.pp > 1:
        return None
    stages = len(job.parallel.split or ())
    if job.parallel.split is not None:
        fit = f" or set parallel.pp={stages}" if stages > 1 else ""
        return f"parallel.split={job.parallel.split} needs a pipeline, but parallel.pp=1; leave split out{fit}"
    if (job.parallel.virtual_stages or 1) > 1:
        return (
            f"parallel.virtual_stages={job.parallel.virtual_stages} needs a pipeline, but parallel.pp=1; leave "
            "virtual_stages out, or set parallel.pp=2"
        )
    return None
