"""`weft diagnose`: every cause, tried on a run, the most expensive first."""

from __future__ import annotations

from collections import Counter

import numpy as np

from weft.extensions.diagnose.evidence import RunEvidence, number, read_evidence
from weft.extensions.diagnose.failures import failure
from weft.extensions.diagnose.finding import Detector, Finding, percent
from weft.extensions.diagnose.layout import large_bubble, small_microbatch, unneeded_recompute
from weft.extensions.diagnose.links import slow_link
from weft.extensions.diagnose.ranks import data_starved, host_bound, neighbour, slow_rank
from weft.extensions.diagnose.throttling import throttling
from weft.job.files.run_folder import RunDir
from weft.planner.number_format import counted, seconds

DETECTORS: tuple[Detector, ...] = (
    slow_rank, slow_link, data_starved, host_bound, throttling, unneeded_recompute, small_microbatch, large_bubble,
    neighbour,
)  # fmt: skip
"""Causes of a slow run. A failure comes first."""
MAX_PLACES = 5
"""Ranks and steps that are listed of a kind of fault."""
MORE_MEMORY: tuple[Detector, ...] = (unneeded_recompute, small_microbatch)
"""Those whose fix takes more memory."""


def diagnose(run: RunDir) -> tuple[list[Finding], RunEvidence]:
    """The findings of a run, and what they were found in."""
    found = read_evidence(run)
    failed = failure(found)
    skipped = MORE_MEMORY if failed is not None and failed.cause == "out_of_memory" else ()
    slow = [finding for detect in DETECTORS if detect not in skipped and (finding := detect(found)) is not None]
    slow.sort(key=lambda finding: -(finding.costs_percent or 0.0))
    return ([failed] if failed else []) + slow, found


def sentences(findings: list[Finding], found: RunEvidence) -> list[str]:
    """The answer for a terminal."""
    lines = [_summary(found), *_faults(found), ""]
    for finding in findings:
        cost = f", {finding.costs_percent:.0f} % of the step" if finding.costs_percent is not None else ""
        lines += [f"{finding.cause.replace('_', ' ')}{cost}: {finding.evidence}.", f"  Try: {finding.fix}.", ""]
    if not findings:
        lines.append("No cause was found in the files of this run.")
    return lines


def _faults(found: RunEvidence) -> list[str]:
    """Faults that were found while the run trained, a line for each kind, and how often it recovered."""
    by_kind: dict[str, list[str]] = {}
    for event in found.events:
        if event.get("event") == "fault":
            step = number(event.get("step"))
            where = [] if event.get("rank") is None else [f"rank {event['rank']}"]
            where += [] if step is None else [f"step {step:.0f}"]
            by_kind.setdefault(str(event.get("fault") or "unknown").replace("_", " "), []).append(" at ".join(where))
    recovered = Counter(str(e.get("fault")).replace("_", " ") for e in found.events if e.get("event") == "recovered")
    lines = []
    for kind, places in by_kind.items():
        shown = "; ".join(filter(None, [*places[:MAX_PLACES], "…" if len(places) > MAX_PLACES else ""]))
        again = f", recovered {recovered[kind]} of {len(places)}" if kind in recovered else ""
        lines.append(f"Fault {kind}, {counted(len(places), 'time')}{again}{f': {shown}' if shown else ''}.")
    return lines


def _summary(found: RunEvidence) -> str:
    """Where the time of a step goes, and predicted beside measured."""
    table, records = found.table, found.records
    if not records:
        return f"{found.run.path}: no steps are recorded."
    text = f"{found.run.path}: {len(records)} steps of {seconds(found.step_s)}"
    planned = number((found.plan.predicted if found.plan else {}).get("step_time_s"))
    if planned:
        text += f" ({seconds(planned)} planned)"
    if table is not None:
        # medians, because a rank may wait for a trace or an evaluation, which is not part of the step's time
        total = float(np.median(table.seconds))
        parts = {"computing": table.figures["busy_s"], "waiting for data": table.get("data_s")}
        parts |= {f"waiting on {axis}": waits for axis, waits in table.waits.items()}
        shares = {what: float(np.median(part.mean(axis=1))) / total for what, part in parts.items()}
        without_core = table.core_wait_share()  # the time between a rank's waits includes it
        shares = {"computing": max(0.0, shares.pop("computing") - without_core), **shares}
        shares["waiting for a core"] = without_core
        text += "; " + ", ".join(f"{what} {percent(share)}" for what, share in shares.items() if share >= 0.005)
    return text + "."
