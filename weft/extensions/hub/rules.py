"""What cannot be done with a model of transformers, by its tables and its attention."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

from weft.extensions.hub.type_facts import TypeFacts
from weft.job.schema import Job

if TYPE_CHECKING:
    from weft.planner.plan import Plan


def split_axes(job: Job) -> set[str]:
    """The axes that can split a model, by its tables."""
    facts = type_facts(json.dumps(job.model.args, sort_keys=True))
    reasons = {"tp": facts.no_tp, "pp": facts.no_pp, "cp": facts.no_cp}
    return {axis for axis, why in reasons.items() if not why}


def hub_rule(job: Job, plan: Plan) -> str | None:
    """Refuse an axis that the tables of a model do not allow."""
    facts = type_facts(json.dumps(job.model.args, sort_keys=True))
    kv = job.model.kv_heads or 1
    if plan.tp > 1 and facts.no_tp:
        return f"parallel.tp={plan.tp}: {facts.no_tp}; dp_shard would work"
    if plan.tp > 1 and kv % plan.tp:
        return f"parallel.tp={plan.tp} does not divide the {kv} key and value heads of {facts.name}; tp={kv} would work"
    if plan.pp > 1 and facts.no_pp:
        return f"parallel.pp={plan.pp}: {facts.no_pp}; dp_shard would work"
    if plan.cp > 1 and facts.no_cp:
        return f"parallel.cp={plan.cp}: {facts.no_cp}; dp_shard would work"
    if plan.precision == "fp8":
        return f"precision=fp8 multiplies layers of Weft's own, and {facts.name} has those of transformers; use bf16"
    if job.data.mask_documents and facts.no_docs:
        return f"data.mask_documents=true: {facts.no_docs}; mask_documents=false would work"
    if job.model.lora is not None and job.model.lora.dropout:
        return f"model.lora.dropout={job.model.lora.dropout:g} has no effect on model.family=transformers; leave it out"
    return None


@cache
def type_facts(args: str) -> TypeFacts:
    """The facts of a config."""
    from weft.extensions.hub.find_facts import find_facts

    return find_facts(args)
