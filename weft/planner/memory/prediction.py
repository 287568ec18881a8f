"""Memory and traffic of one rank under a plan, part by part: what every run prints beside what it measured."""

from __future__ import annotations

from collections import defaultdict

from weft.job.compression import parse_compression
from weft.job.schema import Job
from weft.planner.memory.approximate import rough_memory, rough_traffic
from weft.planner.memory.compiled import compiled_memory
from weft.planner.memory.peak import peak_parts
from weft.planner.memory.rank_bytes import traffic_of
from weft.planner.plan import Plan
from weft.planner.sync import exchange_bytes, one_replica, outer_state_gib
from weft.planner.time.compression_warmup import age, age_ranges

GIB = 2**30
RUNTIME_GIB = {"cpu": 0.35, "cuda": 0.0}
"""torch itself before a single weight: resident on a CPU rank; a GPU's context is not in what its allocator counts."""


def predict_memory(job: Job, plan: Plan) -> dict[str, float]:
    """GiB by part of the fullest rank; empty for a person's own module, whose size is not known before it is built."""
    if job.model.module:
        return {}
    found = _parts(job, one_replica(plan)) | {"runtime_gib": RUNTIME_GIB[plan.device]}
    found["states_gib"] += outer_state_gib(job, plan)
    return {"memory_gib": sum(found.values()), **found}


def is_counted(job: Job, plan: Plan) -> bool:
    """Whether this count is Weft's own; some of experts, and cp in a pipeline, only the estimate (hold.py) can cut."""
    unknown = job.model.experts is not None and not _walked(plan)
    return not (job.model.module or unknown or (plan.cp > 1 and plan.pp > 1))


def stage_peaks(job: Job, plan: Plan) -> list[dict[str, float]]:
    """Bytes by part on the first rank of each stage, where the walk knows the layout; else nothing."""
    stride = plan.world // plan.pp
    return [peak_parts(job, plan, stage * stride) for stage in range(plan.pp)] if _walked(plan) else []


def _walked(plan: Plan) -> bool:
    """Whether the walk through a step's tensors knows this layout."""
    return plan.cp == 1 and not plan.long and plan.recompute in ("none", "full") and plan.precision != "fp8"


def _parts(job: Job, plan: Plan) -> dict[str, float]:
    whole = (
        plan.world == plan.dp_replicate and job.model.experts is None
    )  # what is cut or sorted, the walk knows better
    if plan.compile and whole and not plan.long:
        return compiled_memory(job, plan)
    if not _walked(plan):
        return rough_memory(job, plan)
    parts = max(stage_peaks(job, plan), key=lambda p: p["peak"])
    gathered = min(parts["gathered"], parts["working"])
    return {
        "states_gib": (parts["parameters"] + parts["gradients"] + parts["optimizer"]) / GIB,
        "gathered_gib": gathered / GIB,
        "activations_gib": (parts["working"] - gathered) / GIB,
    }


def communication_bytes(job: Job, plan: Plan) -> dict[str, float]:
    """Bytes one rank of the pipeline's middle hands to collectives in a step, by axis, in the mean over the run;
    received messages apart."""
    return _within(job, one_replica(plan), run_age_ranges(job, plan)) | exchange_bytes(job, plan)


def last_step_bytes(job: Job, plan: Plan) -> dict[str, float]:
    """The same in the run's last step."""
    last = [(1.0, age(job.train.steps - 1, plan.compression_warmup))]
    return _within(job, one_replica(plan), last) | exchange_bytes(job, plan)


def _within(job: Job, plan: Plan, stretches: list[tuple[float, float]]) -> dict[str, float]:
    if not _walked(plan):
        return rough_traffic(job, plan)
    rank = plan.world // plan.pp * (plan.pp // 2)
    out: dict[str, float] = defaultdict(float)
    for share, at in stretches:
        for axis, kinds in traffic_of(job, plan, rank, at).items():
            out[axis] += share * sum(amount for kind, amount in kinds.items() if kind != "recv")
    return dict(out)


def run_age_ranges(job: Job, plan: Plan) -> list[tuple[float, float]]:
    """The stretches of a run in which compression sends differently, as shares of its steps, and their ages."""
    wanted = parse_compression(plan.compression)
    return age_ranges(wanted, job.train.steps, plan.compression_warmup, plan.dp_replicate * max(1, plan.cp_cut))
