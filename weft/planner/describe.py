"""Text descriptions of a plan for the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import groupby

from weft.job.schema import Job
from weft.planner.model.counts import count_parameters, count_trained
from weft.planner.model.fp8 import fp8_share, head_in_fp8
from weft.planner.model.reference_rate import peak_flops
from weft.planner.number_format import counted, human_count
from weft.planner.plan import Plan
from weft.planner.schedules.gantt import gantt_text
from weft.planner.schedules.stage_costs import simulated
from weft.planner.table_placement import table_lines
from weft.planner.tower_costs import tower_lines

MEMORY_LABELS = {
    "states_gib": "states", "gathered_gib": "communication", "activations_gib": "activations", "runtime_gib": "runtime",
}  # fmt: skip
"""Names of the parts of a plan's predicted memory."""
HOMES = ("device", "host", "disk")
MAX_LISTED_STAGES = 16
"""Pipelines with more stages are summarised instead of listed."""


def describe_plan(job: Job, plan: Plan) -> str:
    """A few aligned lines: model, ranks, layout, batch, memory, traffic and the reasons."""
    counts = count_parameters(job.model)
    model = (
        job.model.module
        or f"{job.model.shape or job.model.family}, {human_count(counts.total if counts else 0)} parameters"
    )
    if job.model.lora is not None:
        model += f", of which {human_count(count_trained(job.model))} in adapters are trained"
    share = job.train.global_batch // plan.dp
    rows = [
        ("model", model),
        ("ranks", f"{plan.world} × {plan.device_name}, {plan.backend}, {plan.precision}"),
        ("layout", ", ".join([plan.layout(), *_layout_notes(job, plan)])),
        (
            "batch",
            f"{job.train.global_batch} sequences = {plan.dp} × {share}, in microbatches of {plan.microbatch}"
            f" ({plan.accumulation} a step)",
        ),
        *_epoch_rows(job),
        *_stage_rows(plan),
        ("recompute", recompute_text(job, plan)),
        *([("saved", "activations in fp8, a scale for 128 elements")] if plan.activations == "fp8" else []),
        *_fp8_rows(job, plan),
        *_home_rows(plan),
        *(("tables" if i == 0 else "", line) for i, line in enumerate(table_lines(plan))),
        *(("towers" if i == 0 else "", line) for i, line in enumerate(tower_lines(plan))),
    ]
    if plan.predicted:
        p = plan.predicted
        parts = ", ".join(f"{MEMORY_LABELS[k]} {v:.2f}" for k, v in p.items() if k in MEMORY_LABELS and v)
        rows.append(("memory", f"{p['memory_gib']:.2f} GiB a rank ({parts})"))
        last = p.get("communication_last_mib")
        falls = f" on average, {_amount(last)} in the last one" if last is not None else ""
        rows.append(("traffic", f"{_amount(p['communication_mib'])} a rank and step{falls}"))
    else:
        rows.append(("memory", "not predicted, nor are time and traffic: the module could not be traced here"))
    lines = [f"{name:10} {text}" for name, text in rows]
    return "\n".join([*lines, *(f"{'because' if i == 0 else '':10} {r}" for i, r in enumerate(plan.reasons))])


def _layout_notes(job: Job, plan: Plan) -> list[str]:
    """What else the axes cut; of a user module only its table of parts says whether its norms are."""
    return ["sequence cut with tp"] if plan.sequence and plan.tp > 1 and not job.model.module else []


def _amount(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"


def recompute_text(job: Job, plan: Plan) -> str:
    """What is recomputed."""
    if not plan.long:
        return blocks_text(plan.recompute, job.model.layers)
    chunks = f", in chunks of {plan.chunk} tokens" if plan.chunk else ""
    parked = f"; up to {plan.host_gib:.0f} GiB in host memory" if plan.offloads_activations else ""
    return f"all but attention{chunks}{parked}"


def blocks_text(recompute: int | str, layers: int | None) -> str:
    """The setting, with a number of blocks as a part of all."""
    return f"{recompute} of {layers} blocks" if isinstance(recompute, int) else recompute


def _epoch_rows(job: Job) -> list[tuple[str, str]]:
    train = job.train
    if train.epochs is None:
        return []
    known = "steps" in train.model_fields_set
    return [("steps", f"{train.steps if known else 'as many as the data has'}, {train.epochs:g} epochs")]


def _stage_rows(plan: Plan) -> list[tuple[str, str]]:
    if plan.pp == 1:
        return []
    blocks = ", ".join(f"{a}–{b - 1}" if b > a + 1 else str(a) if b > a else "none" for a, b in plan.split)
    if len(plan.split) > MAX_LISTED_STAGES:
        blocks = f"in {len(plan.split)} stages of {run_lengths([b - a for a, b in plan.split])}"
    blocks = (
        f"blocks {blocks}" if plan.split else f"{plan.pp * plan.virtual_stages}, by the weights of the module's parts"
    )
    return [("stages", f"{blocks}; {plan.schedule}, {counted(plan.accumulation, 'microbatch', 'es')}")]


def _home_rows(plan: Plan) -> list[tuple[str, str]]:
    """What lives where, and what is copied in a step."""
    if not plan.homes:
        return []
    by_home = groupby(sorted(plan.homes, key=lambda row: HOMES.index(row["home"])), key=lambda row: row["home"])
    rows: list[tuple[str, str]] = []
    for home, kinds in by_home:
        listed = list(kinds)
        what = ", ".join(f"{row['kind']} {row['gib']:.2f} GiB" for row in listed)
        moved, back = (sum(row.get(key, row["moved_gib"]) for row in listed) for key in ("moved_gib", "stored_gib"))
        ways = "and" if abs(moved - back) < 0.005 else f"and {back:.2f} GiB"
        rows.append(("homes" if not rows else "", f"{home}: {what}"
                     + (f"; {moved:.2f} GiB to the device {ways} back in a step" if moved else "")))  # fmt: skip
    return rows


def _fp8_rows(job: Job, plan: Plan) -> list[tuple[str, str]]:
    share = fp8_share(job, plan)
    if plan.precision != "fp8" or share is None:
        return []
    head = "with the head, " if head_in_fp8(job, plan.tp) else ""
    how = f"{share:.0%} of the FLOPs, {head}{plan.fp8['scaling']}, {plan.fp8['amax']} scales; the rest in bf16"
    peak = peak_flops(plan, job)
    if peak is None:
        return [("fp8", how)]
    formula = (
        f"FLOPs / (time × {peak / 1e12:.0f} TFLOP/s): {share:.0%} at the fp8 peak, {1 - share:.0%} at the bf16 peak"
    )
    return [("fp8", how), ("mfu", formula)]


def run_lengths(numbers: Sequence[int]) -> str:
    """Numbers with repeats counted: `1, 62 × 2, 1`."""
    groups = [(value, len(list(some))) for value, some in groupby(numbers)]
    return ", ".join(f"{count} × {value}" if count > 2 else ", ".join([str(value)] * count) for value, count in groups)


def draw_schedule(job: Job, plan: Plan, width: int | None = None) -> str:
    """The pipeline's simulated time line for the terminal."""
    return gantt_text(simulated(job, plan), width=min(width or shutil.get_terminal_size().columns, 140))
