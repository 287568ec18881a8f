"""`weft plan`: the plan of a job and the requested tables, as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.cli.terminal import LABEL_WIDTH, fit, paint
from weft.cli.views import plan_tables as tables
from weft.hardware.process_age import process_age_s
from weft.job.errors import FitError, JobError
from weft.job.schema import Job
from weft.planner.advice.auto_gain import auto_gain
from weft.planner.advice.compromise import knee
from weft.planner.advice.fitting_changes import changes
from weft.planner.advice.history import read_history
from weft.planner.advice.hyperparameters import token_budget, tune
from weft.planner.advice.mixed_devices import mixed
from weft.planner.advice.offers import compare_offers
from weft.planner.advice.pinned_job import pinned_job, tuned_job
from weft.planner.advice.why_not import why_not
from weft.planner.calibration import Calibration
from weft.planner.describe import describe_plan, draw_schedule
from weft.planner.explain_memory import explain_memory
from weft.planner.make_plan import (
    PlanStart,
    check_fits,
    complete_plan,
    or_settings_that_fit,
    pick_layout,
    runs_here,
    start_plan,
    with_module_prediction,
)
from weft.planner.number_format import gib, gib_difference
from weft.planner.own_calibration import own_calibration
from weft.planner.search.survey import Survey, survey

TABLE_HEADS = ("runners-up ", "front ", "would fit with ", "offer ", "history ", "setting ")
WARNINGS = ("faster", "note")
"""Rows that ask for a decision."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command."""

    top: int = 5
    front: bool = False
    gantt: bool = False
    why_not: str | None = None
    compare: Sequence[str] = ()
    history: Path | None = None
    tune: bool = False
    tokens: float | None = None
    apply: bool = False
    explain: str | None = None
    width: int | None = None
    """Columns that the text is fitted into; None for any."""


@dataclass(frozen=True)
class PlanOutput:
    """The text, the JSON data, and the error to fail with after printing."""

    text: str
    data: dict[str, Any]
    failed: FitError | None = None
    job: Job | None = None
    """With --apply: the job with the chosen layout and the tuned settings."""


def styled(text: str, width: int | None) -> str:
    """The text of a plan, fitted to the terminal and in its colours."""
    lines = []
    for line in fit(text, width).split("\n"):
        label = line[:LABEL_WIDTH]
        if line.startswith(TABLE_HEADS):
            line = paint(line, "bold")
        elif re.match(r"[a-z][a-z0-9 ]* +$", label) and len(line) > LABEL_WIDTH:
            line = paint(label, "yellow" if label.strip() in WARNINGS else "cyan") + line[LABEL_WIDTH:]
        lines.append(line)
    return "\n".join(lines)


def show(job: Job, nproc: int | None, asked: PlanOptions) -> PlanOutput:
    """Plan a job and collect the requested output."""
    if asked.explain not in (None, "memory"):
        raise JobError(f"--explain {asked.explain} is not a figure that can be explained; memory would work")
    start = start_plan(job, nproc)
    if asked.apply and asked.tune:
        settings = tune(start.job, start.world, asked.tokens)
        asked = replace(asked, tokens=asked.tokens or token_budget(start.job))
        job = tuned_job(job, settings)
        start = start_plan(job, nproc)
    if start.job.model.module:
        return _own_model(start, asked)
    calibration = own_calibration(start.job, start.device)
    data: dict[str, Any] = {}
    blocks: list[str] = []
    if asked.history:
        history, calibration = read_history(asked.history, start.device.name, calibration)
        data["history"] = history.to_json()
        blocks.append(tables.history_table(history, asked.width))
    made = survey(start, asked.top, asked.front, beyond=not runs_here(start), calibration=calibration)
    data = {**made.to_json(), **data}
    if (best := knee(made.front)) is not None:
        data["pareto_knee"] = made.front.index(best)
    text = [draw_schedule(made.job, made.plan, asked.width)] if asked.gantt else []
    if asked.explain == "memory":
        text.append(explain_memory(made.job, made.plan, made.found.estimator.limit_gib))
    if made.fits:
        blocks = [
            tables.runners_up(made, asked.width),
            *([tables.pareto_front(made, asked.width)] if asked.front else []),
            *blocks,
        ]
    failed = None if made.fits else _fit_error(made)
    if not made.fits:
        found = changes(start, calibration, made.found.smallest_gib)
        data |= {
            "short_gib": made.found.smallest_gib - made.found.estimator.limit_gib,
            "changes": [c.to_json() for c in found],
        }
        blocks.append(tables.changes_that_fit(found, asked.width))
    _add_tables(start, made, asked, calibration, data, blocks)
    pinned = pinned_job(job, made.plan) if asked.apply and made.fits else None
    took = process_age_s()
    data["search"]["seconds"] = took
    first = [describe_plan(made.job, made.plan), tables.estimates(made, took)]
    if (gain := auto_gain(job, made.plan, calibration) if made.fits else None) is not None:
        data["auto"] = gain.to_json()
        first.append(f"faster     {gain}")
    return PlanOutput("\n\n".join(block for block in [*first, *text, *blocks] if block), data, failed, pinned)


def _add_tables(
    start: PlanStart,
    made: Survey,
    asked: PlanOptions,
    calibration: Calibration,
    data: dict[str, Any],
    blocks: list[str],
) -> None:
    if asked.why_not is not None:
        data["why_not"] = why_not(made, asked.why_not)
        blocks.append(f"why not {asked.why_not}: {data['why_not']['verdict']}; {data['why_not']['because']}")
    if asked.compare:
        offers = compare_offers(start, list(asked.compare), calibration)
        data["compare"] = [o.to_json() for o in offers]
        blocks.append(tables.offers_table(offers, asked.width))
    if start.job.cluster.also:
        ways = mixed(start, calibration)
        data["mixed"] = [way.to_json() for way in ways]
        blocks.append(tables.mixed_devices(ways))
    if asked.tune:
        settings = tune(start.job, start.world, asked.tokens)
        data["tune"] = [t.to_json() for t in settings]
        blocks.append(tables.tuned_settings(settings, asked.width))


def _fit_error(made: Survey) -> FitError:
    found, asked = made.found, made.start.asked or made.job
    limit, need = found.estimator.limit_gib, found.smallest_gib
    if made.job.parallel != "auto":
        try:
            check_fits(made.job, made.plan)
        except FitError as error:
            return FitError(f"{error}; in total {gib(need)} GiB, {gib(gib_difference(need, limit))} too much")
    memory = (
        f"{made.plan.device_name} has {gib(float(found.estimator.cluster.memory_gib))} ({gib(limit)} of them usable)"
    )
    if made.job.memory.budget_gib and limit >= 0.999 * made.job.memory.budget_gib:
        memory = f"memory.budget_gib={made.job.memory.budget_gib:g} allows {gib(limit)}"
    return FitError(
        f"no layout fits: the smallest, {made.plan.layout()}, needs {gib(need)} GiB a rank, but "
        f"{memory}, "
        f"so {gib(gib_difference(need, limit))} are missing{or_settings_that_fit(asked, made.plan.world)}"
    )


def _own_model(start: PlanStart, asked: PlanOptions) -> PlanOutput:
    """Output for a model of your own, which is built and traced to know its memory and time."""
    searched = {
        "--why-not": asked.why_not is not None, "--compare": bool(asked.compare), "--explain": bool(asked.explain),
        "--history": asked.history is not None,
    }  # fmt: skip
    for option in (name for name, given in searched.items() if given):
        raise JobError(
            f"{option} is about layouts that are searched; those of a module ({start.job.model.module}) are not: "
            f"weft plan without {option} shows its layout, memory and time"
        )
    job, plan = complete_plan(start, *pick_layout(start)[:2])
    plan = with_module_prediction(job, plan)
    text = describe_plan(job, plan) + ("\n\n" + draw_schedule(job, plan, asked.width) if asked.gantt else "")
    data = {"job": job.model_dump(mode="json"), **plan.to_json()}
    return PlanOutput(text, data, None, pinned_job(start.job, plan) if asked.apply else None)
