"""Out of memory: explain what takes the memory, and continue with smaller microbatches."""

from __future__ import annotations

import os
from dataclasses import replace

from weft.job.files.run_folder import RunDir
from weft.planner.plan import Plan
from weft.watch.journal import Journal

ERROR_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
"""Phrases in torch's messages, on GPU and CPU."""


def is_oom(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in ERROR_TEXTS)


def smaller(plan: Plan) -> Plan | None:
    """The same global batch in microbatches of half the size; None if they cannot be smaller."""
    if plan.microbatch < 2:
        return None
    share = plan.microbatch * plan.accumulation
    half = next(m for m in range(plan.microbatch // 2, 0, -1) if share % m == 0)
    reason = f"microbatch {half} instead of {plan.microbatch}: memory ran out"
    return replace(plan, microbatch=half, accumulation=share // half, reasons=(*plan.reasons, reason))


def with_microbatch(plan: Plan, most: int) -> Plan:
    """The plan in microbatches of at most that size; 0 for no limit."""
    while 0 < most < plan.microbatch and (half := smaller(plan)) is not None:
        plan = half
    return plan


PARTS = {"states_gib": "weights, gradients and optimizer", "gathered_gib": "communication",
         "activations_gib": "activations and logits"}  # fmt: skip
"""Labels of the plan's predicted memory parts."""


def explain(error: BaseException, plan: Plan) -> str:
    """One sentence: the plan's memory parts, largest first, and which setting needs less."""
    found = sorted(((plan.predicted.get(key, 0.0), label) for key, label in PARTS.items()), reverse=True)
    parts = ", ".join(f"{label} {gib:.2f} GiB" for gib, label in found if gib)
    half = smaller(plan)
    change = f"train.microbatch={half.microbatch}" if half else "memory.recompute=full, or more ranks"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"memory ran out ({first}); the plan counts {parts or 'no parts'}; {change} takes less"


def shrink(run: RunDir, plan: Plan, error: BaseException, rank: int, position: str) -> Plan | None:
    """Write the plan of the next attempt with smaller microbatches and log it; None if they cannot be smaller.

    Called by the rank that ran out of memory; needs no other rank. Several ranks write the same plan.
    """
    why, less = explain(error, plan), smaller(plan)
    with Journal(run) as journal:
        journal.event("fault", fault="oom", rank=rank, position=position, step=None, why=why, detected_after_s=0.0)
        if less is None:
            return None
        temporary = run.plan.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(less.dumps(), encoding="utf-8")
        temporary.replace(run.plan)
        journal.event(
            "recovered", fault="oom", how="smaller_microbatch", step=None, steps_lost=0, seconds=0.0,
            microbatch=less.microbatch, was=plan.microbatch,
        )  # fmt: skip
    return less
