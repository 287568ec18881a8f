"""The table of rules: each returns one sentence with the settings that clash and the nearest that work."""

from __future__ import annotations

from collections.abc import Callable

from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.model import FAMILIES
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.planner.rules.adapter_rules import frozen_rule, lora_rule
from weft.planner.rules.batch_rules import batch_rule, drop_last_rule, metrics_rule, microbatch_rule, ramp_rule
from weft.planner.rules.communication_rules import (
    allreduce_rule,
    compressed_experts_rule,
    encryption_rule,
    launcher_rule,
)
from weft.planner.rules.context_rules import cp_style_rule, sequence_rule
from weft.planner.rules.data_rules import growing_rule, images_rule, tasks_rule
from weft.planner.rules.embedding_rules import tables_rule
from weft.planner.rules.expert_rules import experts_rule
from weft.planner.rules.fp8_rules import fp8_rule
from weft.planner.rules.memory_rules import activations_rule, offload_rule, recompute_rule, tiers_rule
from weft.planner.rules.optimizer_rules import layer_decay_rule, lr_scaling_rule
from weft.planner.rules.pipeline_rules import pipeline_rule
from weft.planner.rules.tensor_rules import heads_rule, padding_rule, width_rule
from weft.planner.rules.tower_rules import retrieval_rule, towers_rule
from weft.planner.sync import sync_rule

Rule = Callable[[Job, Plan], str | None]


def mixed_devices_rule(job: Job, plan: Plan) -> str | None:
    """cluster.also is not supported in training."""
    if not job.cluster.also:
        return None
    names = ", ".join(group.device for group in job.cluster.also)
    return f"cluster.also={names}: several kinds of devices can be planned but not trained on yet; leave it out"


def family_rule(job: Job, plan: Plan) -> str | None:
    """What the entry of the model's family refuses."""
    family = FAMILIES[job.model.family] if job.model.family and not job.model.module else None
    if family is None or not family.rule:
        return None
    refusal: str | None = find_object(family.rule, "model.family")(job, plan)
    return refusal


def power_cap_rule(job: Job, plan: Plan) -> str | None:
    """Only GPUs have a power limit that can be set."""
    if job.watch.power_cap_w is None or plan.device == "cuda":
        return None
    return f"watch.power_cap_w={job.watch.power_cap_w:g} limits GPUs, and the ranks are on {plan.device}; leave it out"


TP_RULES: tuple[Rule, ...] = (heads_rule, width_rule, padding_rule)

RULES: tuple[Rule, ...] = (
    *TP_RULES, lora_rule, frozen_rule, batch_rule, microbatch_rule, ramp_rule, drop_last_rule, tasks_rule, growing_rule,
    images_rule, metrics_rule, pipeline_rule, sequence_rule, cp_style_rule, offload_rule, tiers_rule,
    fp8_rule, experts_rule, recompute_rule, activations_rule, allreduce_rule, compressed_experts_rule, sync_rule,
    encryption_rule, layer_decay_rule, lr_scaling_rule, tables_rule, towers_rule, retrieval_rule, family_rule,
)  # fmt: skip
"""A layout that breaks one of these can be neither planned nor trained."""

RUNNABLE: tuple[Rule, ...] = (mixed_devices_rule, launcher_rule, power_cap_rule)
"""A layout that breaks one of these can be planned, but not trained."""


def check(job: Job, plan: Plan, rules: tuple[Rule, ...] = RULES) -> None:
    """Raise a JobError with every broken rule."""
    broken = [text for rule in rules if (text := rule(job, plan))]
    if broken:
        raise JobError("\n".join(broken))
