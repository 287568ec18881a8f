"""Rules of recompute, offload and chunks."""

from __future__ import annotations

import os

from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.planner.rules.context_rules import attends
from weft.planner.schedules.known_schedules import splits_backward

IN_PARTS = {"activations": "memory.offload=none", "all": "memory.offload=states"}
"""What leaves out the offload of activations."""


def parts_setting(plan: Plan) -> str:
    """The setting by which blocks are processed in parts."""
    return f"memory.offload={plan.offload}" if plan.offloads_activations else f"memory.chunk={plan.chunk}"


def whole_blocks(plan: Plan) -> str:
    """What would work instead of processing blocks in parts."""
    return f"{IN_PARTS.get(plan.offload, 'memory.chunk=0')} with memory.recompute=full would work"


def offload_rule(job: Job, plan: Plan) -> str | None:
    """Activation offload and chunks need a transformer and an undivided backward pass."""
    if not plan.long:
        return None
    setting = parts_setting(plan)
    if job.model.has_source:
        return (
            f"{setting} works on blocks of one sequence, and model.family={job.model.family} has two; "
            f"{whole_blocks(plan)}"
        )
    if not attends(job):
        what = job.model.module or f"model.family={job.model.family}"
        return f"{setting} works on a transformer's blocks, and {what} is not a transformer; {whole_blocks(plan)}"
    if splits_backward(plan):
        return (
            f"{setting} computes a block's gradients in one pass, and parallel.schedule={plan.schedule} splits them; "
            "schedule=1f1b would work"
        )
    if job.memory.recompute not in ("auto", "full") and (plan.offloads_activations or job.memory.chunk):
        return (
            f"memory.recompute={job.memory.recompute} has no effect with {setting}, which already recomputes most of "
            "a block; recompute=auto would work"
        )
    return None


def recompute_rule(job: Job, plan: Plan) -> str | None:
    """memory.recompute fits the model, the budget and the schedule."""
    asked, layers = job.memory.recompute, job.model.layers
    if isinstance(asked, int) and layers and asked > layers:
        return f"memory.recompute={asked}, but the model has {layers} blocks; recompute=full recomputes them all"
    if job.memory.budget_gib and asked != "auto":
        return (
            f"memory.budget_gib={job.memory.budget_gib:g} chooses the recompute, and memory.recompute={asked} sets "
            "it; leave one of them out"
        )
    if job.memory.budget_gib and job.model.module:
        return "memory.budget_gib needs one of Weft's models, whose memory is known; set memory.recompute instead"
    if plan.recompute == "selective" and splits_backward(plan):
        return (
            f"parallel.schedule={plan.schedule} runs a block's backward twice, for its input and for its weights, "
            "and memory.recompute=selective keeps outputs for one pass; recompute=full or schedule=1f1b would work"
        )
    return None


def activations_rule(job: Job, plan: Plan) -> str | None:
    """Activations in fp8 are those that autograd saves; selective recompute keeps its own."""
    if plan.activations == "exact" or plan.recompute != "selective" or plan.long:
        return None
    return (
        f"memory.activations={plan.activations} stores what autograd saves, and memory.recompute=selective keeps "
        "outputs of operators besides; recompute=none or full would work"
    )


def tiers_rule(job: Job, plan: Plan) -> str | None:
    """States outside of the device need an optimizer of this rank's own, and settings that have an effect."""
    memory = job.memory
    offloads = memory.offload in ("states", "all", "auto")
    for name in ("offload_fraction", "disk", "disk_gib", "disk_tbw"):
        if name in memory.model_fields_set and getattr(memory, name) not in (None, "auto") and not offloads:
            return (
                f"memory.{name}={getattr(memory, name)} has no effect with memory.offload={memory.offload}; "
                "memory.offload=states would work"
            )
    if memory.disk and os.path.isfile(os.path.expanduser(memory.disk)):
        return f"memory.disk={memory.disk} is a file; a folder on a local disk would work"
    if memory.homes and not offloads:
        return f"memory.homes has no effect with memory.offload={memory.offload}; memory.offload=states would work"
    for what in ("weights", "gradients"):
        given: object = memory.homes.get(what, {})
        if given == "disk" or (isinstance(given, dict) and given.get("disk")):
            return f"memory.homes keeps {what} on disk, but {what} live on the device or in host memory"
    if isinstance(memory.homes.get("gradients"), dict):
        return "memory.homes has shares of gradients, and all of them leave or none; gradients: host would work"
    if plan.gradient_home != "device" and (problem := _gradients_problem(job, plan)):
        return problem
    if plan.weight_share and (problem := _weights_problem(job, plan)):
        return problem
    for kind, shares in plan.home_shares.items():
        if shares.get("disk") and (kind == "averages" or not memory.disk):
            what = "averages live on the device or in host memory" if memory.disk else "it needs memory.disk=FOLDER"
            return f"memory.homes keeps {kind} on disk, but {what}"
        needs = {"master": ("split master weights", plan.split_master), "averages": ("train.ema", job.train.ema)}
        if kind in needs and not needs[kind][1]:
            return f"memory.homes has {kind}, and this job has none: they come with {needs[kind][0]}"
    for name in ("disk_gib", "disk_tbw"):
        if getattr(memory, name) and not memory.disk:
            return f"memory.{name}={getattr(memory, name):g} needs the folder that it is about; add memory.disk=FOLDER"
    if (memory.split_master is True or plan.states == "24bit-master") and not plan.split_master:
        what = f"{plan.world} ranks" if plan.world > 1 else f"precision={plan.precision}"
        what = f"model.module={job.model.module}" if job.model.module else what
        if plan.states == "24bit-master":
            return (
                "memory.states=24bit-master stores fp32 weights of one rank as bf16 and 8 bits, not with "
                f"{what}; memory.states=8bit would work"
            )
        return f"memory.split_master=true splits fp32 weights of one rank into bf16 and 16 bits, not with {what}"
    if not plan.tiered:
        return None
    setting = f"memory.offload={memory.offload}" if offloads else f"memory.states={plan.states}"
    setting = "memory.split_master=true" if not offloads and plan.states == "exact" else setting
    if plan.sync != "step":
        return (
            f"{setting} updates weights in the next forward pass, and train.sync={plan.sync} "
            "exchanges them before; train.sync=step would work"
        )
    if plan.ep_rebalance:
        return (
            f"{setting} keeps states where experts cannot move them, as "
            f"parallel.ep_rebalance={plan.ep_rebalance:g} would; ep_rebalance=0 would work"
        )
    return None


def _gradients_problem(job: Job, plan: Plan) -> str | None:
    """Why gradients cannot live in host memory, or be released."""
    released = plan.gradient_home == "released"
    what = "updates blocks in the backward pass" if released else "keeps gradients in host memory"
    if plan.world > 1:
        return (
            f"memory.homes {what}, and {plan.world} ranks sum or share gradients on the device; one rank, or "
            "gradients: device with parallel.dp_shard, would work"
        )
    if not released:
        return None
    if job.optim.clip:
        return f"memory.homes {what}, before the norm is known that optim.clip={job.optim.clip:g} needs; clip=0 works"
    if plan.precision == "fp16":
        return f"memory.homes {what}, before overflows are known that precision=fp16 can have; precision=bf16 works"
    if plan.accumulation > 1 or job.train.batch_ramp:
        why = f"{plan.accumulation} microbatches" if plan.accumulation > 1 else "those of train.batch_ramp"
        return f"memory.homes {what} of one microbatch, and a step sums {why}; gradients: host would work"
    return None


def _weights_problem(job: Job, plan: Plan) -> str | None:
    """Why weights cannot live in host memory."""
    setting = "memory.homes keeps weights" if "weights" in job.memory.homes else f"memory.offload={job.memory.offload}"
    setting += " in host memory" if "weights" in job.memory.homes else " keeps weights in host memory"
    if plan.dp_shard > 1:
        return (
            f"{setting}, unit by unit, and parallel.dp_shard={plan.dp_shard} gathers them from shards; more ranks in "
            "dp_shard with zero=3, or parallel.tp or parallel.pp instead of it, would work"
        )
    if splits_backward(plan):
        return (
            f"{setting} until the backward pass of their block, and parallel.schedule={plan.schedule} splits that pass;"
            " schedule=1f1b would work"
        )
    return None
