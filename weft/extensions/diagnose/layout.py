"""Causes in the plan itself: unneeded recompute, a microbatch that is too small, a bubble that is too large."""

from __future__ import annotations

from dataclasses import replace

from weft.extensions.diagnose.evidence import RunEvidence, number
from weft.extensions.diagnose.finding import Finding, percent
from weft.planner.plan import Plan

MIN_GAIN = 0.05
"""Share of the step's time that a change must save."""
SMALL_MICROBATCH_TOKENS = 256
"""Tokens below which a microbatch of a CPU rank spends most of its time outside of matrix products."""
MAX_BUBBLE = 0.2
FREE_MEMORY = 0.9
"""Share of the memory that a run without recompute may use."""


def unneeded_recompute(found: RunEvidence) -> Finding | None:
    """Activations are computed twice although there is memory to keep them."""
    plan, now = found.plan, found.planned
    if plan is None or now is None or plan.recompute in ("none", 0):
        return None
    for less in ("none", "selective"):
        if less == plan.recompute:
            return None
        then = found.estimate(replace(plan, recompute=less))
        if then is None or not then["fits"]:
            continue
        measured = max(
            (m for r in found.records if (m := number(r.get("peak_memory_gib")))), default=now["peak_memory_gib"]
        )
        needed = measured + max(0.0, then["peak_memory_gib"] - now["peak_memory_gib"])
        saved = 1 - (then["hfu"] / then["mfu"]) / (now["hfu"] / now["mfu"]) if now["mfu"] and then["mfu"] else 0.0
        saved *= _compute_share(found)
        if needed > FREE_MEMORY * then["memory_limit_gib"] or saved < MIN_GAIN:
            continue
        evidence = (
            f"memory.recompute={plan.recompute} computes activations twice, but without it a rank needs "
            f"{needed:.2f} of {then['memory_limit_gib']:.1f} GiB"
        )
        return Finding("unneeded_recompute", evidence, f"memory.recompute={less}", None, 100 * saved)
    return None


def _compute_share(found: RunEvidence) -> float:
    """Share of the step in which ranks compute."""
    table = found.table
    if table is None:
        return 1.0
    return min(1.0, float(table.figures["busy_s"].mean() / table.seconds.mean()))


def small_microbatch(found: RunEvidence) -> Finding | None:
    """Microbatches are too small to use the device."""
    plan, now, job = found.plan, found.planned, found.job
    if plan is None or now is None or job is None or plan.accumulation < 2 or plan.pp > 1:
        return None
    best: tuple[float, Plan] | None = None
    factor = 2
    while plan.accumulation % factor == 0:
        larger = replace(plan, microbatch=plan.microbatch * factor, accumulation=plan.accumulation // factor)
        then = found.estimate(larger)
        if then is not None and then["fits"]:
            gain = 1 - then["step_time_s"] / now["step_time_s"]
            best = max(best or (0.0, larger), (gain, larger), key=lambda pair: pair[0])
        factor *= 2
    if best is None:
        return None
    tokens = plan.microbatch * job.data.seq_len
    gain, larger = best
    if plan.device == "cpu":
        if job.model.takes_vectors or tokens >= SMALL_MICROBATCH_TOKENS:
            return None
    elif gain < MIN_GAIN:
        return None
    evidence = (
        f"a step has {plan.accumulation} microbatches of {plan.microbatch} ({tokens} tokens); memory holds "
        f"{larger.microbatch} at once"
    )
    evidence += f", and the planner expects {percent(gain)} less time" if gain > MIN_GAIN else ""
    cost = 100 * gain if gain > MIN_GAIN else None
    return Finding("small_microbatch", evidence, f"train.microbatch={larger.microbatch}", None, cost)


def large_bubble(found: RunEvidence) -> Finding | None:
    """Pipeline stages wait for one another too long."""
    plan = found.plan
    measured = found.pipeline.get("measured")
    bubble = number(measured.get("bubble")) if isinstance(measured, dict) else None
    if plan is None or plan.pp < 2 or bubble is None or bubble < MAX_BUBBLE:
        return None
    simulated = found.pipeline.get("simulated")
    expected = number(simulated.get("bubble")) if isinstance(simulated, dict) else None
    beside = f"; the schedule alone has {percent(expected)}" if expected is not None else ""
    evidence = (
        f"stages of the pipeline are idle {percent(bubble)} of the recorded step, with {plan.accumulation} "
        f"microbatches on {plan.pp} stages and schedule {plan.schedule}{beside}"
    )
    fixes = []
    if plan.microbatch > 1 and plan.accumulation < 4 * plan.pp:
        fixes.append(f"train.microbatch={max(1, plan.microbatch // 2)} doubles the number of microbatches")
    else:
        fixes.append("raise train.global_batch, which adds microbatches")
    if plan.schedule not in ("zb-h1", "zbv", "dualpipe-v", "interleaved"):
        fixes.append("try parallel.schedule=zb-h1 or interleaved (weft plan --gantt draws them)")
    if expected is not None and bubble > 1.5 * expected:
        fixes.append("balance the stages: some compute longer than others")
    return Finding("large_bubble", evidence, "; ".join(fixes), None, 100 * bubble)
