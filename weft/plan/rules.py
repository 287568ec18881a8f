"""What cannot work, in one table: each rule names the settings that clash and the nearest that works."""

from __future__ import annotations

from collections.abc import Callable

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.plan.layout import Plan

Rule = Callable[[Job, Plan], str | None]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest(value: int, options: list[int]) -> int:
    """The option closest to value, the smaller one of two."""
    return min(options, key=lambda o: (abs(o - value), o))


def _or(options: list[int]) -> str:
    words = [str(o) for o in options]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _tp_heads(job: Job, plan: Plan) -> str | None:
    heads, kv = job.model.heads, job.model.kv_heads
    if plan.tp == 1 or not heads or not kv:
        return None
    fit = [d for d in divisors(heads) if kv % d == 0]
    if heads % plan.tp:
        return f"parallel.tp={plan.tp} does not divide model.heads={heads}; tp={_or(fit)} would work"
    if kv % plan.tp:
        return (
            f"parallel.tp={plan.tp} does not divide model.kv_heads={kv}: each rank needs a whole key and value head; "
            f"tp={_or(fit)} would work"
        )
    return None


def _tp_ffn(job: Job, plan: Plan) -> str | None:
    ffn = job.model.ffn if job.model.family != "mlp" else job.model.dim
    if plan.tp == 1 or not ffn or ffn % plan.tp == 0:
        return None
    name = "model.ffn" if job.model.family != "mlp" else "model.dim"
    up = -(-ffn // plan.tp) * plan.tp
    return f"{name}={ffn} is not a multiple of parallel.tp={plan.tp}; {name}={up} would work"


def _batch(job: Job, plan: Plan) -> str | None:
    batch = job.train.global_batch
    if batch % plan.dp == 0:
        return None
    up, down = -(-batch // plan.dp) * plan.dp, batch // plan.dp * plan.dp
    fit = f"{down} or {up}" if down else str(up)
    return f"train.global_batch={batch} is not a multiple of the {plan.dp} data-parallel ranks; {fit} would work"


def _microbatch(job: Job, plan: Plan) -> str | None:
    if _batch(job, plan):
        return None
    share = job.train.global_batch // plan.dp
    given, accumulation = job.train.microbatch, job.train.accumulation
    if job.parallel != "auto" and job.parallel.microbatches != "auto":
        if accumulation not in ("auto", job.parallel.microbatches):
            return (
                f"parallel.microbatches={job.parallel.microbatches} and train.accumulation={accumulation} are the same "
                "thing; leave one of them out"
            )
        accumulation = job.parallel.microbatches
    if isinstance(given, int) and isinstance(accumulation, int) and given * accumulation != share:
        return (
            f"train.microbatch={given} × train.accumulation={accumulation} is not the {share} sequences of a rank "
            f"(global_batch {job.train.global_batch} / {plan.dp} ranks); leave one of them out"
        )
    for name, value in (("microbatch", given), ("accumulation", accumulation)):
        if isinstance(value, int) and share % value:
            fit = nearest(value, divisors(share))
            return (
                f"train.{name}={value} does not divide the {share} sequences of a rank (global_batch "
                f"{job.train.global_batch} / {plan.dp} ranks); {name}={fit} would work"
            )
    return None


def _own(job: Job, plan: Plan) -> str | None:
    if job.model.module and plan.pp > 1:
        return f"parallel.pp={plan.pp} needs one of Weft's models; for {job.model.module} use dp_replicate or dp_shard"
    return None


def _not_yet(setting: str, off: Callable[[Plan], bool], value: Callable[[Plan], object], works: str) -> Rule:
    def rule(job: Job, plan: Plan) -> str | None:
        text = f"{setting}={value(plan)} can be planned but not trained yet; {works} would work"
        return None if off(plan) else text

    return rule


def _experts(job: Job, plan: Plan) -> str | None:
    if job.model.experts is None:
        return None
    name = f"model.shape={job.model.shape}" if job.model.shape else "model.experts"
    return f"{name} has experts, which can be planned but not trained yet; a dense shape such as llama-1b would work"


def _kinds(job: Job, plan: Plan) -> str | None:
    if not job.cluster.also:
        return None
    names = ", ".join(group.device for group in job.cluster.also)
    return f"cluster.also={names}: several kinds of devices can be planned but not trained on yet; leave it out"


TP_RULES: tuple[Rule, ...] = (_tp_heads, _tp_ffn)

RULES: tuple[Rule, ...] = (*TP_RULES, _batch, _microbatch, _own)
"""Whatever breaks one of these can be neither planned nor run."""

RUNNABLE: tuple[Rule, ...] = (
    _experts,
    _kinds,
    _not_yet("parallel.cp", lambda p: p.cp == 1, lambda p: p.cp, "cp=1"),
    _not_yet("parallel.ep", lambda p: p.ep == 1, lambda p: p.ep, "ep=1"),
    _not_yet("placement", lambda p: p.placement == "shards-near", lambda p: p.placement, "placement=shards-near"),
    _not_yet("precision", lambda p: p.precision != "fp8", lambda p: p.precision, "precision=bf16"),
)
"""Whatever breaks one of these can be planned, but not trained by this version."""


def check(job: Job, plan: Plan, rules: tuple[Rule, ...] = RULES) -> None:
    """Raise a JobError with every broken rule."""
    broken = [text for rule in rules if (text := rule(job, plan))]
    if broken:
        raise JobError("\n".join(broken))
