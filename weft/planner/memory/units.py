"""A stage's units, as a rank passes through them: their weights, and the bytes of their forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.job.schema import Job
from weft.planner.engine_constants import LOGITS_BYTES
from weft.planner.memory.block import block_passing, head_passing
from weft.planner.memory.experts import mixture_of
from weft.planner.memory.rank_bytes import FP32_BYTES, compute_bytes
from weft.planner.memory.tape import Passing, Sizes
from weft.planner.model.parameters import ParamShard, param_shards, stage_range
from weft.planner.plan import Plan

CHUNK = LOGITS_BYTES["cpu"] // FP32_BYTES
"""Logits that the loss holds at once (models/loss.py)."""


@dataclass(frozen=True)
class Unit:
    """What is gathered, passed and cut as one: a block, or all that stands outside the blocks."""

    gathered: float
    """Bytes of its weights in the compute dtype, whole on this rank of tp, with padding."""
    elements: float
    cut: float
    """Elements of this rank's shard, with padding."""
    passing: Passing
    apart: Unit | None = None
    """Experts that are gathered inside of it, as a unit of their own."""

    @property
    def all_gathered(self) -> float:
        return self.gathered + (self.apart.gathered if self.apart else 0.0)


@dataclass(frozen=True)
class Stage:
    """A stage of this rank."""

    blocks: tuple[Unit, ...]
    root: Unit
    begin: Passing | None
    end: Passing | None
    head_grad: float
    """Bytes of the head's gradient, which its forward pass makes."""
    hidden: float
    """Bytes of one microbatch between two stages."""
    extra: float
    """Kept once for each microbatch: cosines, sines and masks."""
    later: float
    """Gradients that a split backward keeps for its second half, a block."""


def _retains(plan: Plan) -> bool:
    """Whether the gradients of a unit's weights stay until the unit is done, instead of being added to others."""
    again = plan.accumulation > 1 and plan.precision == "fp32"
    return not (again and plan.zero == 1) if plan.dp_shard > 1 else not again and _unbucketed(plan)


def _unbucketed(plan: Plan) -> bool:
    return plan.dp_replicate == 1 and plan.precision == "fp32"


def sizes_of(job: Job, plan: Plan) -> Sizes:
    """A block's sizes on a rank; the shards of tp are equal but for the vocabulary."""
    m = job.model
    tokens = plan.microbatch * job.data.seq_len / plan.cp
    head_dim = m.head_dim or 0
    return Sizes(
        rows=tokens / plan.tp if plan.sequence else tokens, tokens=tokens, dim=m.dim or 0,
        heads=(m.heads or 0) * head_dim / plan.tp, kv=(m.kv_heads or 0) * head_dim / plan.tp,
        scores=(m.heads or 0) / plan.tp, ffn=(m.ffn or 0) / plan.tp,
        c=compute_bytes(plan), tp=plan.tp, sequence=plan.sequence,
        retain=_retains(plan),
        fused=plan.device == "cuda",
    )  # fmt: skip


def _unit(plan: Plan, shards: list[ParamShard], passing: Passing) -> Unit:
    inside = [p for p in shards if p.weight.experts and plan.ep > 1 and plan.dp_shard > 1]
    apart = _unit(replace(plan, ep=1), inside, NOTHING) if inside else None
    shards = [p for p in shards if p not in inside]
    elements = sum(p.gathered for p in shards)
    return Unit(elements * compute_bytes(plan), elements, sum(p.padded for p in shards), passing, apart)


NOTHING = Passing(0.0, 0.0, 0.0)


def make_stage(job: Job, plan: Plan, stage: int, coords: dict[str, int]) -> Stage:
    """A stage's units and what their passes take."""
    m, c = job.model, compute_bytes(plan)
    first, end, begins, ends = stage_range(m, plan, stage)
    shards = param_shards(m, plan, stage, coords)
    units: dict[str, list[ParamShard]] = {}
    for p in shards:
        units.setdefault(p.weight.unit, []).append(p)
    if m.is_stack:
        return _mlp_stage(job, plan, units, ends)
    z = sizes_of(job, plan)
    full, mix = plan.recompute == "full", mixture_of(job, plan)
    kinds = {True: block_passing(m, z, full), False: block_passing(m, z, full, mix)}
    root = units.get("", [])
    hidden = z.rows * z.dim * c
    begin = tail = None
    head_grad = 0.0
    if begins:
        begin = _embed_passing(job, plan, z, root)
    if ends:
        vocab = next(p for p in root if p.weight.name in ("head.weight", "embed.weight")[:: -1 if m.tied else 1])
        rows = vocab.whole / (m.dim or 1)
        targets = plan.microbatch if m.is_classifier else z.tokens
        tail, head_grad = head_passing(m, z, rows, targets, CHUNK)
    seq = job.data.seq_len
    extra = float(FP32_BYTES * seq * (m.head_dim or 0) * (plan.microbatch if job.data.mask_documents else 1))
    extra = extra if m.positions == "rope" else 8.0 * seq
    if job.data.mask_documents:
        extra += plan.microbatch * seq * seq
        mask = plan.microbatch * float(seq) * seq * c
        kinds = {
            dense: replace(p, kept=p.kept + (0.0 if full else mask), forward=p.forward + mask)
            for dense, p in kinds.items()
        }
    wide = z.ffn if mix is None else (mix.uses * mix.ffn + z.tokens * mix.shared) / z.tokens
    later = z.tokens * c * (z.heads + 2 * z.kv + (2 if m.activation == "swiglu" else 1) * wide) + 4 * hidden
    dense = 0 if m.experts is None else m.experts.first_dense
    blocks = tuple(_unit(plan, units[f"blocks.{i}"], kinds[i < dense]) for i in range(first, end))
    return Stage(blocks, _unit(plan, root, NOTHING), begin, tail, head_grad, hidden, extra, later)


def _embed_passing(job: Job, plan: Plan, z: Sizes, root: list[ParamShard]) -> Passing:
    """Out of the embedding, with learned positions; its gradient is as large as its table."""
    m = job.model
    out, whole = z.rows * z.dim * z.c, z.tokens * z.dim * z.c
    learned = m.positions == "learned"
    forward = out + (2 * whole + out if plan.tp > 1 and not m.is_classifier else 0) + (2 * out if learned else 0)
    kept = out + (z.tokens * 9 if plan.tp > 1 else 0)
    tables = [p.whole * z.c for p in root if p.weight.name in ("embed.weight", "positions.weight")]
    backward = max(tables, default=0.0) + (2 * whole if plan.tp > 1 and plan.sequence else 0)
    return Passing(kept, forward, backward)


def _mlp_stage(job: Job, plan: Plan, units: dict[str, list[ParamShard]], ends: bool) -> Stage:
    """Square layers with a GELU before each but the first; each keeps what goes into the GELU and into the matrix."""
    c, dim = compute_bytes(plan), job.model.dim or 0
    x = plan.microbatch * dim * c
    full = plan.recompute == "full"
    passing = Passing(x if full else 2 * x, 3 * x, (4 if full else 3) * x + dim * dim * c / plan.tp)
    tail = (
        Passing(0.0, 3 * plan.microbatch * dim * FP32_BYTES, 3 * plan.microbatch * dim * FP32_BYTES) if ends else None
    )
    blocks = tuple(_unit(plan, shards, passing) for shards in units.values())
    return Stage(blocks, Unit(0.0, 0.0, 0.0, NOTHING), None, tail, 0.0, x, 0.0, 2 * x)
