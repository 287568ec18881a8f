"""Out of memory: which part took it, what to change, and the same step in smaller pieces."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.layout import Plan

SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
"""How torch says it, on a GPU and on a CPU."""


def is_oom(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def smaller(plan: Plan) -> Plan | None:
    """The same global batch in microbatches of half the size; None where they cannot be smaller."""
    if plan.microbatch < 2:
        return None
    share = plan.microbatch * plan.accumulation
    half = next(m for m in range(plan.microbatch // 2, 0, -1) if share % m == 0)
    reason = f"microbatch {half} instead of {plan.microbatch}: memory ran out"
    return replace(plan, microbatch=half, accumulation=share // half, reasons=(*plan.reasons, reason))


def explain(error: BaseException, parts: dict[str, float], plan: Plan) -> str:
    """One sentence: what took the memory by the plan's own table, in GiB, and what would take less."""
    told = [
        f"{name.replace('_', ' ')} {gib:.2f} GiB" for name, gib in sorted(parts.items(), key=lambda p: -p[1]) if gib
    ]
    table = f"; by the plan {', '.join(told[:4])}" if told else ""
    change = {
        True: f"train.microbatch={max(1, plan.microbatch // 2)}",
        False: "memory.recompute=full",
    }[plan.microbatch > 1]
    return f"memory ran out ({str(error).strip().splitlines()[0][:200]}){table}; try {change}"
