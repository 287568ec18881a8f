"""What cannot work, in one table: each rule names the settings that clash and the nearest that works."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

from weft.hardware.catalog import DEVICES
from weft.hardware.rank_environment import under_mpi
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner.model.fp8 import ALIGN, fp8_share
from weft.planner.plan import Plan
from weft.planner.schedules.registry import splits
from weft.planner.sync import sync_rule
from weft.planner.time.context import ulysses_fits

Rule = Callable[[Job, Plan], str | None]


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest(value: int, options: list[int]) -> int:
    """The option closest to value, the smaller one of two."""
    return min(options, key=lambda o: (abs(o - value), o))


def _or(options: list[int]) -> str:
    words = [str(o) for o in options]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _tp_heads(job: Job, plan: Plan) -> str | None:
    heads, kv = job.model.heads, job.model.kv_heads
    if plan.tp == 1 or not attends(job) or not heads or not kv:
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
    ffn = job.model.ffn if not job.model.is_stack else job.model.dim
    if plan.tp == 1 or not ffn or ffn % plan.tp == 0:
        return None
    name = "model.ffn" if not job.model.is_stack else "model.dim"
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
    given, accumulation, setting = job.train.microbatch, job.train.accumulation, "train.accumulation"
    if job.parallel != "auto" and job.parallel.microbatches != "auto":
        if accumulation not in ("auto", job.parallel.microbatches):
            return (
                f"parallel.microbatches={job.parallel.microbatches} and train.accumulation={accumulation} are the same "
                "thing; leave one of them out"
            )
        accumulation, setting = job.parallel.microbatches, "parallel.microbatches"
    if isinstance(given, int) and isinstance(accumulation, int) and given * accumulation != share:
        return (
            f"train.microbatch={given} × {setting}={accumulation} is not the {share} sequences of a rank "
            f"(global_batch {job.train.global_batch} / {plan.dp} ranks); leave one of them out"
        )
    for name, value in (("train.microbatch", given), (setting, accumulation)):
        if isinstance(value, int) and share % value:
            fit = nearest(value, divisors(share))
            return (
                f"{name}={value} does not divide the {share} sequences of a rank (global_batch "
                f"{job.train.global_batch} / {plan.dp} ranks); {name.partition('.')[2]}={fit} would work"
            )
    return None


def _pipeline_only(job: Job, plan: Plan) -> str | None:
    """What only a pipeline has would be passed over in silence without one."""
    if job.parallel == "auto" or plan.pp > 1:
        return None
    stages = len(job.parallel.split or ())
    if job.parallel.split is not None:
        fit = f" or set parallel.pp={stages}" if stages > 1 else ""
        return f"parallel.split={job.parallel.split} cuts a pipeline, but parallel.pp=1; leave split out{fit}"
    if (job.parallel.virtual_stages or 1) > 1:
        return (
            f"parallel.virtual_stages={job.parallel.virtual_stages} needs a pipeline, but parallel.pp=1; leave "
            "virtual_stages out, or set parallel.pp=2"
        )
    return None


def _own(job: Job, plan: Plan) -> str | None:
    if job.model.module and plan.pp > 1:
        return f"parallel.pp={plan.pp} needs one of Weft's models; for {job.model.module} use dp_replicate or dp_shard"
    return None


def attends(job: Job) -> bool:
    """Whether the model is one of Weft's transformers; an mlp may carry a shape's heads and has no use for them."""
    return not job.model.module and not job.model.is_stack


def _cp_family(job: Job, plan: Plan) -> str | None:
    if plan.cp == 1 or attends(job):
        return None
    what = job.model.module or f"model.family={job.model.family}"
    return f"parallel.cp={plan.cp} cuts a sequence, and {what} has none that Weft knows; use dp_replicate or dp_shard"


def _cp_heads(job: Job, plan: Plan) -> str | None:
    heads, kv = job.model.heads, job.model.kv_heads
    if plan.cp == 1 or not attends(job) or not heads or not kv or plan.cp_style not in ("ulysses", "hybrid"):
        return None
    mine, mine_kv = max(1, heads // plan.tp), max(1, kv // plan.tp)
    of_rank = f"model.heads={heads} and model.kv_heads={kv}" + (f" over tp={plan.tp}" if plan.tp > 1 else "")
    if plan.cp_style == "hybrid" and plan.cp_group == 1:
        return (
            f"parallel.cp_style=hybrid with cp={plan.cp} and {of_rank} leaves no group between one rank and all of "
            "them; cp_style=ring would work"
        )
    if plan.cp_style == "ulysses" and not ulysses_fits(plan.cp, mine, mine_kv):
        fit = [d for d in divisors(mine) if ulysses_fits(d, mine, mine_kv)]
        return (
            f"parallel.cp_style=ulysses cannot deal out {of_rank} to cp={plan.cp} ranks; cp={_or(fit)} would work, "
            "or cp_style=ring"
        )
    return None


def _long(job: Job, plan: Plan) -> str | None:
    if not plan.long:
        return None
    setting = "memory.offload=activations" if plan.offload == "activations" else f"memory.chunk={plan.chunk}"
    if not attends(job):
        what = job.model.module or f"model.family={job.model.family}"
        return f"{setting} works on a transformer's blocks, and {what} is none; memory.recompute=full would work"
    if splits(plan):
        return (
            f"{setting} makes a block's gradients all at once, and parallel.schedule={plan.schedule} splits them; "
            "schedule=1f1b would work"
        )
    if job.memory.recompute not in ("auto", "full") and (job.memory.offload == "activations" or job.memory.chunk):
        return (
            f"memory.recompute={job.memory.recompute} has no say beside {setting}, which computes most of a block "
            "again by itself; recompute=auto would work"
        )
    return None


def _fp8_head(job: Job, plan: Plan) -> str | None:
    vocab, dim, each = job.model.vocab or 0, job.model.dim or 0, ALIGN * plan.tp
    if not vocab:
        return "fp8.head=true and a model without a vocabulary; fp8.head=false would work"
    if not vocab % each and not dim % ALIGN:
        return None
    over = f" over tp={plan.tp}" if plan.tp > 1 else ""
    other = "" if dim % ALIGN else f"model.vocab={-(-vocab // each) * each} or "
    return (
        f"fp8.head=true and model.vocab={vocab}{over}, model.dim={dim}: the head's sizes must be multiples of {ALIGN}; "
        f"{other}fp8.head=false would work"
    )


def _fp8(job: Job, plan: Plan) -> str | None:
    if job.fp8.amax == "delayed" and job.fp8.scaling == "rowwise":
        return (
            "fp8.amax=delayed and fp8.scaling=rowwise: the rows of one step are not those of the next; "
            "scaling=tensorwise or amax=dynamic would work"
        )
    if plan.precision == "fp8" and not job.fp8.skip and not job.model.experts and fp8_share(job, plan) == 0:
        over = f" over tp={plan.tp}" if plan.tp > 1 else ""
        return (
            f"precision=fp8 has nothing to multiply: with model.dim={job.model.dim}{over} no layer's sizes are "
            "multiples of 16; precision=bf16 would work"
        )
    if plan.precision == "fp8" and job.fp8.head and (why := _fp8_head(job, plan)):
        return why
    if plan.precision != "fp8" or plan.device_name not in DEVICES or plan.device == "cpu":
        return None
    if DEVICES[plan.device_name].peak_tflops.get("fp8"):
        return None
    return f"precision=fp8 needs fp8 products, which {plan.device_name} does not have; precision=bf16 would work"


def _experts(job: Job, plan: Plan) -> str | None:
    experts = job.model.experts
    if experts is None:
        if plan.ep > 1:
            return f"parallel.ep={plan.ep} cuts experts, and the model has none; ep=1 would work, or a model.experts"
        return None
    if job.model.module or not job.model.is_decoder:
        what = job.model.module or f"model.family={job.model.family}"
        return f"model.experts needs a decoder, and {what} is none; family=llama or gpt2 would work"
    if plan.long:
        setting = "memory.offload=activations" if plan.offload == "activations" else f"memory.chunk={plan.chunk}"
        return (
            f"{setting} takes a block apart, and model.experts balances whole sequences; memory.recompute=full would "
            "work"
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
            f"ep={_or(fit)} would work"
        )
    if count % plan.ep:
        return f"parallel.ep={plan.ep} does not divide model.experts.count={count}; ep={_or(fit)} would work"
    if plan.ep_overlap and plan.ep_hop > 1:
        return "parallel.ep_overlap=true halves a direct exchange, and ep_exchange=two-hop is none; direct would work"
    groups = job.model.experts.groups
    if plan.ep_rebalance and groups > 1 and not plan.ep_copies:
        return (
            f"parallel.ep_copies=0 lets ep_rebalance={plan.ep_rebalance:g} only give experts other numbers, and "
            f"model.experts.groups={groups} goes by their numbers; ep_copies=1 would work, or ep_rebalance=0"
        )
    width = shared * (job.model.experts.ffn or 0)
    if width % plan.tp:
        return (
            f"parallel.tp={plan.tp} cuts the {shared} shared experts, whose width of {width} it does not divide; "
            f"tp={_or([d for d in divisors(plan.tp) if width % d == 0])} would work"
        )
    return None


def _recompute(job: Job, plan: Plan) -> str | None:
    asked, layers = job.memory.recompute, job.model.layers
    if isinstance(asked, int) and layers and asked > layers:
        return f"memory.recompute={asked}, but the model has {layers} blocks; recompute=full recomputes them all"
    if job.memory.budget_gib and asked != "auto":
        return (
            f"memory.budget_gib={job.memory.budget_gib:g} chooses the recompute, but memory.recompute={asked} has "
            "chosen already; leave one of them out"
        )
    if job.memory.budget_gib and job.model.module:
        return "memory.budget_gib needs one of Weft's models, whose memory is known; set memory.recompute instead"
    if plan.recompute == "selective" and splits(plan):
        return (
            f"parallel.schedule={plan.schedule} goes back through a block twice, for its input and for its weights, "
            "and memory.recompute=selective keeps its outputs for once; recompute=full or schedule=1f1b would work"
        )
    return None


def _allreduce(job: Job, plan: Plan) -> str | None:
    if job.comm.allreduce in ("auto", "native"):
        return None
    if job.comm.compression != "none":
        return (
            f"comm.allreduce={job.comm.allreduce} sums gradients as they are, and "
            f"comm.compression={job.comm.compression} sends them otherwise; allreduce=auto would work"
        )
    if plan.dp_shard == 1:
        return None
    return (
        f"comm.allreduce={job.comm.allreduce} is how replicas sum their gradients, and under "
        f"parallel.dp_shard={plan.dp_shard} the backend sums them; allreduce=auto or dp_replicate would work"
    )


def _compressed_experts(job: Job, plan: Plan) -> str | None:
    if job.comm.compression == "none" or plan.ep == 1:
        return None
    return (
        f"comm.compression={job.comm.compression} acts on gradients that all data-parallel ranks sum, and "
        f"parallel.ep={plan.ep} gives each rank experts of its own; compression=none or ep=1 would work"
    )


def _not_yet(setting: str, off: Callable[[Plan], bool], value: Callable[[Plan], object], works: str) -> Rule:
    def rule(job: Job, plan: Plan) -> str | None:
        text = f"{setting}={value(plan)} can be planned but not trained yet; {works} would work"
        return None if off(plan) else text

    return rule


def _kinds(job: Job, plan: Plan) -> str | None:
    if not job.cluster.also:
        return None
    names = ", ".join(group.device for group in job.cluster.also)
    return f"cluster.also={names}: several kinds of devices can be planned but not trained on yet; leave it out"


def _mpi(job: Job, plan: Plan) -> str | None:
    if plan.backend != "mpi" or plan.world == 1 or under_mpi():
        return None
    return f"comm.backend=mpi needs ranks that MPI started: mpirun -n {plan.world} weft train …; gloo would work"


TP_RULES: tuple[Rule, ...] = (_tp_heads, _tp_ffn)

RULES: tuple[Rule, ...] = (
    *TP_RULES, _batch, _microbatch, _pipeline_only, _own, _cp_family, _cp_heads, _long, _fp8, _experts, _recompute,
    _allreduce, _compressed_experts, sync_rule,
)  # fmt: skip
"""Whatever breaks one of these can be neither planned nor run."""

RUNNABLE: tuple[Rule, ...] = (
    _kinds,
    _mpi,
    _not_yet("placement", lambda p: p.placement == "shards-near", lambda p: p.placement, "placement=shards-near"),
)
"""Whatever breaks one of these can be planned, but not trained by this version."""


def check(job: Job, plan: Plan, rules: tuple[Rule, ...] = RULES) -> None:
    """Raise a JobError with every broken rule."""
    broken = [text for rule in rules if (text := rule(job, plan))]
    if broken:
        raise JobError("\n".join(broken))
