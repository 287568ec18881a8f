"""`weft estimate`: a job, or a table of published runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.cli.table_scorers import TABLE_SCORERS
from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.load import load_job
from weft.planner.calibration import load_calibration
from weft.planner.job_estimate import estimate_job, show_estimate
from weft.planner.make_plan import make_plan


def run_and_show(
    job: str | None, overrides: list[str], table: Path | None, stack: str | None, fit: bool, nproc: int | None,
    as_json: bool,
) -> str:  # fmt: skip
    """The output of the command."""
    if (job is None) == (table is None):
        raise JobError("weft estimate takes a JOB or --table FILE.csv, one of them")
    if table is not None:
        scorer = next(iter(TABLE_SCORERS), None)
        if scorer is None:
            raise JobError("weft estimate --table needs an extension that reads tables, such as Weft's own `published`")
        scores: dict[str, Any] = find_object(scorer.score, "--table")(table, fit, stack)
        return json.dumps(scores, indent=2) if as_json else str(find_object(scorer.show, "--table")(scores))
    assert job is not None
    described, plan = make_plan(load_job(job, overrides), nproc)
    result = estimate_job(described, plan, load_calibration(stack) if stack else "weft")
    return json.dumps(result, indent=2) if as_json else show_estimate(result)
