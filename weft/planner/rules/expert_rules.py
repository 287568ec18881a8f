"""Rules of experts and expert parallelism."""

from __future__ import annotations

from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.planner.rules.arithmetic import divisors, either
from weft.planner.rules.memory_rules import parts_setting, whole_blocks


def experts_rule(job: Job, plan: Plan) -> str | None:
    """Experts need whole blocks, and ep needs experts."""
    experts = job.model.experts
    if experts is None:
        if plan.ep > 1:
            return (
                f"parallel.ep={plan.ep} distributes experts, and the model has none; ep=1 would work, or set "
                "model.experts"
            )
        return None
    if plan.long:
        return (
            f"{parts_setting(plan)} processes a block in parts, and model.experts balances whole sequences; "
            f"{whole_blocks(plan)}"
        )
    layers = job.model.layers or 0
    if experts.first_dense >= layers:
        return (
            f"model.experts.first_dense={experts.first_dense} leaves none of the {layers} blocks with experts; "
            f"first_dense={layers - 1} would work, or model.experts=null"
        )
    return _ep(job, plan)


def _ep(job: Job, plan: Plan) -> str | None:
    assert job.model.experts is not None
    count, shared = job.model.experts.count, job.model.experts.shared
    over = plan.dp_shard * plan.cp * plan.tp
    fit = [d for d in divisors(over) if count % d == 0]
    if over % plan.ep:
        return (
            f"parallel.ep={plan.ep} is laid over dp_shard × cp × tp, which are {over} ranks, and does not divide them; "
            f"ep={either(fit)} would work"
        )
    if count % plan.ep:
        return f"parallel.ep={plan.ep} does not divide model.experts.count={count}; ep={either(fit)} would work"
    if plan.ep_overlap and plan.ep_hop > 1:
        return (
            "parallel.ep_overlap=true needs a direct exchange, and ep_exchange=two-hop is set; ep_exchange=direct "
            "would work"
        )
    groups = job.model.experts.groups
    if plan.ep_rebalance and groups > 1 and not plan.ep_copies:
        return (
            f"parallel.ep_copies=0 allows ep_rebalance={plan.ep_rebalance:g} only to renumber experts, and "
            f"model.experts.groups={groups} depends on their numbers; ep_copies=1 would work, or ep_rebalance=0"
        )
    width = job.model.experts.shared_width
    if width % plan.tp:
        return (
            f"parallel.tp={plan.tp} cuts the {shared} shared experts, whose width of {width} it does not divide; "
            f"tp={either([d for d in divisors(plan.tp) if width % d == 0])} would work"
        )
    return None
