"""The peak of one rank's memory in a step, counted in tensors: states, and a walk over its units' passes.

The walk follows the engine: units are gathered and cut as FSDP2 does it, microbatches wait as the schedule says, and
gradients come one unit after the other. `weft dryrun` traces the same; bench/memory.py holds both beside a real run.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.schema import Job
from weft.job.shapes import PATCH_DIM
from weft.plan.exact import FLOAT, states_of, width
from weft.plan.layout import Plan
from weft.plan.schedule import make_schedule
from weft.plan.tape import Passing, Sizes, block_passing, head_passing
from weft.plan.weights import Piece, coords_of, pieces_of, stage_range, stages_of

CHUNK = 1 << 24
"""Logits that the loss holds at once (models/loss.py)."""
AHEAD = 2
"""Messages of a pipeline that are awaited before they are needed (parallel/wire.py)."""


@dataclass(frozen=True)
class Unit:
    """What is gathered, passed and cut as one: a block, or all that stands outside the blocks."""

    gathered: float
    """Bytes of its weights in the compute dtype, whole on this rank of tp, with padding."""
    elements: float
    cut: float
    """Elements of this rank's piece, with padding."""
    passing: Passing


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


@dataclass
class Walk:
    """Live bytes on the way through a step."""

    live: float
    peak: float = 0.0

    def add(self, size: float) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def flash(self, size: float) -> None:
        self.peak = max(self.peak, self.live + size)


def peak_parts(job: Job, plan: Plan, rank: int = 0) -> dict[str, float]:
    """Bytes at the peak: parameters, gradients, optimizer, and the rest, which comes and goes within a step."""
    states = states_of(job, plan, rank)
    if states is None:
        return {}
    lasting = states.parameters + states.copies + states.optimizer + states.average
    buckets = plan.dp_shard == 1 and (plan.dp_replicate > 1 or plan.precision != "fp32")
    walk = Walk(lasting + (states.gradients if buckets else 0) + plan.accumulation * batch_bytes(job, plan))
    _Step(job, plan, rank, walk, buckets).run()
    walk.peak = max(walk.peak, lasting + states.gradients + _optimizer_flash(job, plan, rank))
    return {
        "parameters": states.parameters + states.copies + states.average,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "working": walk.peak - states.total,
        "gathered": _gathered(job, plan, rank),
        "peak": walk.peak,
    }


def _gathered(job: Job, plan: Plan, rank: int) -> float:
    """Weights that shards must hold whole at once: all of them, or those of two blocks and of what is outside."""
    if plan.dp_shard == 1:
        return 0.0
    coords = coords_of(plan, rank)
    units: dict[tuple[int, str], float] = {}
    for stage in stages_of(plan, coords["pp"]):
        for p in pieces_of(job.model, plan, stage, coords):
            key = (stage, p.weight.unit)
            units[key] = units.get(key, 0.0) + p.padded * plan.dp_shard * width(plan)
    if plan.zero < 3:
        return sum(units.values())
    outside = max((size for (_, unit), size in units.items() if not unit), default=0.0)
    return outside + 2 * max((size for (_, unit), size in units.items() if unit), default=0.0)


def peak_of(job: Job, plan: Plan, rank: int = 0) -> float:
    """The peak in bytes; 0 for a module of a person's own."""
    return peak_parts(job, plan, rank).get("peak", 0.0)


def batch_bytes(job: Job, plan: Plan) -> float:
    """One microbatch of data: ids, inputs, targets, valid and, where documents are masked, theirs."""
    model, size, seq = job.model, plan.microbatch, job.data.seq_len
    if model.family == "mlp":
        return size * (8 + 2 * FLOAT * (model.dim or 0) + 1)
    if model.family == "vit":
        return size * (8 + FLOAT * seq * PATCH_DIM + 8 + 1)
    return size * (8 + seq * (8 + 8 + 1 + (16 if job.data.mask_documents else 0)))


def _optimizer_flash(job: Job, plan: Plan, rank: int) -> float:
    """AdamW and SGD are fused and need nothing; the others make a few tensors of one weight's size."""
    if job.optim.name in ("adamw", "sgd"):
        return 0.0
    coords = coords_of(plan, rank)
    pieces = [p for s in stages_of(plan, coords["pp"]) for p in pieces_of(job.model, plan, s, coords)]
    if job.optim.name == "adafactor":
        return 3 * FLOAT * max(p.held for p in pieces)
    whole = [p.weight.shape[0] * p.weight.shape[1] for p in pieces if len(p.weight.shape) == 2 and p.weight.unit]
    return 5 * FLOAT * max(whole, default=0)


def _retains(plan: Plan) -> bool:
    """Whether the gradients of a unit's weights stay until the unit is done, instead of being added to others."""
    again = plan.accumulation > 1 and plan.precision == "fp32"
    return not (again and plan.zero == 1) if plan.dp_shard > 1 else not again and _unbucketed(plan)


def _unbucketed(plan: Plan) -> bool:
    return plan.dp_replicate == 1 and plan.precision == "fp32"


def sizes_of(job: Job, plan: Plan) -> Sizes:
    """A block's sizes on a rank; the pieces of tp are equal but for the vocabulary."""
    m = job.model
    tokens = plan.microbatch * job.data.seq_len / plan.cp
    head_dim = m.head_dim or 0
    return Sizes(
        rows=tokens / plan.tp if plan.sequence else tokens, tokens=tokens, dim=m.dim or 0,
        heads=(m.heads or 0) * head_dim / plan.tp, kv=(m.kv_heads or 0) * head_dim / plan.tp,
        scores=(m.heads or 0) / plan.tp, ffn=(m.ffn or 0) / plan.tp, c=width(plan), tp=plan.tp, sequence=plan.sequence,
        retain=_retains(plan),
        fused=plan.device == "cuda",
    )  # fmt: skip


def _unit(plan: Plan, pieces: list[Piece], passing: Passing) -> Unit:
    elements = sum(p.padded * plan.dp_shard if plan.dp_shard > 1 else p.whole for p in pieces)
    return Unit(elements * width(plan), elements, sum(p.padded for p in pieces), passing)


NOTHING = Passing(0.0, 0.0, 0.0)


def make_stage(job: Job, plan: Plan, stage: int, coords: dict[str, int]) -> Stage:
    """A stage's units and what their passes take."""
    m, c = job.model, width(plan)
    first, end, begins, ends = stage_range(m, plan, stage)
    pieces = pieces_of(m, plan, stage, coords)
    units: dict[str, list[Piece]] = {}
    for p in pieces:
        units.setdefault(p.weight.unit, []).append(p)
    if m.family == "mlp":
        return _mlp_stage(job, plan, units, ends)
    z = sizes_of(job, plan)
    passing = block_passing(m, z, plan.recompute == "full")
    root = units.get("", [])
    hidden = z.rows * z.dim * c
    begin = tail = None
    head_grad = 0.0
    if begins:
        begin = _embed_passing(job, plan, z, root)
    if ends:
        vocab = next(p for p in root if p.weight.name in ("head.weight", "embed.weight")[:: -1 if m.tied else 1])
        rows = vocab.whole / (m.dim or 1)
        targets = plan.microbatch if m.family == "vit" else z.tokens
        tail, head_grad = head_passing(m, z, rows, targets, CHUNK)
    seq = job.data.seq_len
    extra = float(FLOAT * seq * (m.head_dim or 0) * (plan.microbatch if job.data.mask_documents else 1))
    extra = extra if m.positions == "rope" else 8.0 * seq
    if job.data.mask_documents:
        extra += plan.microbatch * seq * seq
        mask = plan.microbatch * float(seq) * seq * c
        passing = Passing(
            passing.kept + (0.0 if plan.recompute == "full" else mask), passing.forward + mask, passing.backward
        )
    again = block_passing(m, z, False).kept - passing.kept if plan.recompute == "full" else 0.0
    later = again + z.tokens * c * (z.heads + 2 * z.kv + (2 if m.activation == "swiglu" else 1) * z.ffn) + 4 * hidden
    blocks = tuple(_unit(plan, units[f"blocks.{i}"], passing) for i in range(first, end))
    return Stage(blocks, _unit(plan, root, NOTHING), begin, tail, head_grad, hidden, extra, later)


def _embed_passing(job: Job, plan: Plan, z: Sizes, root: list[Piece]) -> Passing:
    """Out of the embedding, with learned positions; its gradient is as large as its table."""
    m = job.model
    out, whole = z.rows * z.dim * z.c, z.tokens * z.dim * z.c
    learned = m.positions == "learned"
    forward = out + (2 * whole + out if plan.tp > 1 and m.family != "vit" else 0) + (2 * out if learned else 0)
    kept = out + (z.tokens * 9 if plan.tp > 1 else 0)
    tables = [p.whole * z.c for p in root if p.weight.name in ("embed.weight", "positions.weight")]
    backward = max(tables, default=0.0) + (2 * whole if plan.tp > 1 and plan.sequence else 0)
    return Passing(kept, forward, backward)


def _mlp_stage(job: Job, plan: Plan, units: dict[str, list[Piece]], ends: bool) -> Stage:
    """Square layers with a GELU before each but the first; each keeps what goes into the GELU and into the matrix."""
    c, dim = width(plan), job.model.dim or 0
    x = plan.microbatch * dim * c
    full = plan.recompute == "full"
    passing = Passing(x if full else 2 * x, 3 * x, (4 if full else 3) * x + dim * dim * c / plan.tp)
    tail = Passing(0.0, 3 * plan.microbatch * dim * FLOAT, 3 * plan.microbatch * dim * FLOAT) if ends else None
    blocks = tuple(_unit(plan, pieces, passing) for pieces in units.values())
    return Stage(blocks, Unit(0.0, 0.0, 0.0, NOTHING), None, tail, 0.0, x, 0.0, 2 * x)


class _Step:
    """One step of one rank, unit by unit."""

    def __init__(self, job: Job, plan: Plan, rank: int, walk: Walk, buckets: bool):
        self.job, self.plan, self.walk, self.buckets = job, plan, walk, buckets
        coords = coords_of(plan, rank)
        self.pp_rank = coords["pp"]
        self.stages = {s: make_stage(job, plan, s, coords) for s in stages_of(plan, coords["pp"])}
        self.sharded, self.c = plan.dp_shard > 1, width(plan)
        self.split = False
        self.graded: set[tuple[int, int]] = set()
        """Units whose gradients exist, by stage and number; -1 is the root."""
        self.scattering = 0.0
        """Bytes of the last unit's gradients on their way into their cut."""
        self.ready: set[int] = set()
        """Stages whose weights stay gathered."""

    def run(self) -> None:
        plan = self.plan
        if plan.pp == 1:
            for i in range(min(plan.accumulation, 2)):
                last = i == min(plan.accumulation, 2) - 1
                self.forward(0)
                self.backward(0, last)
            return
        schedule = make_schedule(plan.schedule, plan.pp, plan.accumulation, plan.virtual_stages)
        actions = schedule.actions[self.pp_rank]
        self.split = any(a.kind in "IW" for a in actions)
        final = {a.stage: i for i, a in enumerate(actions) if a.kind in "BW"}
        sources = {schedule.rank_of[o] for s in self.stages for o in (s - 1, s + 1) if 0 <= o < schedule.stages}
        one = next(iter(self.stages.values())).hidden
        self.walk.add(AHEAD * one * len(sources - {self.pp_rank}))
        for i, action in enumerate(actions):
            last = final[action.stage] == i
            if action.kind == "F":
                self.forward(action.stage)
                continue
            if action.kind == "W":
                self.weights(action.stage, last)
            else:
                self.backward(action.stage, last, whole=action.kind == "B")
            if (
                plan.backend == "gloo" and action.kind in "BI"
            ):  # it says that a message has left only when asked to wait
                sent = [o for o in (action.stage - 1, action.stage + 1) if 0 <= o < schedule.stages]
                self.walk.add(one * sum(schedule.rank_of[o] != self.pp_rank for o in sent))

    def forward(self, index: int) -> None:
        s, w = self.stages[index], self.walk
        w.add(s.extra + (s.hidden if s.begin is None else 0.0))
        self._gather(index, s.root, root=True)
        before = s.root.gathered if self.sharded and index not in self.ready else 0.0
        if s.begin is not None:
            w.flash(s.begin.forward)
            w.add(s.begin.kept)
        for unit in s.blocks:
            if self.sharded and index not in self.ready:
                w.add(2 * unit.gathered)  # the pieces of the unit before are let go only now
                w.add(-before)
                before = unit.gathered
            w.flash(unit.passing.forward)
            w.add(unit.passing.kept)
            if self._recuts:
                w.add(-unit.gathered)
        if s.end is not None:
            w.flash(s.end.forward)
            w.add(s.end.kept)
        w.add(-before)
        if self._recuts:
            w.add(-s.root.gathered)
        elif self.sharded:
            self.ready.add(index)

    @property
    def _recuts(self) -> bool:
        return self.sharded and self.plan.zero == 3 and not self.split

    @property
    def _adds(self) -> bool:
        """Whether whole fp32 gradients wait for the last microbatch, and autograd adds to them in place."""
        return self.sharded and self.c == FLOAT and (self.plan.zero == 1 or self.split)

    def _gather(self, index: int, unit: Unit, root: bool = False) -> None:
        if self.sharded and index not in self.ready:
            self.walk.add(2 * unit.gathered)

    def backward(self, index: int, last: bool, whole: bool = True) -> None:
        s, w = self.stages[index], self.walk
        grad = s.hidden
        if self._recuts:
            w.add(2 * s.root.gathered)
            w.add(-s.root.gathered)
        ahead = s.blocks[-1].gathered if self._recuts and s.blocks else 0.0
        w.add(ahead)
        if s.end is not None:
            w.flash(s.end.backward)
            w.add(-s.end.kept + s.head_grad + grad)
            if self._adds and (index, -1) in self.graded:
                w.add(-s.head_grad)
            if not self.sharded and not self._tied(s):
                self._grads(index, -2, s.head_grad, s.head_grad / self.c * FLOAT)
        else:
            w.add(grad)
        for i in reversed(range(len(s.blocks))):
            unit = s.blocks[i]
            if self._recuts:
                w.add(2 * unit.gathered - ahead)
                ahead = s.blocks[i - 1].gathered if i else 0.0
                w.add(-unit.gathered + ahead)
            w.flash(unit.passing.backward)
            if whole:
                w.add(-unit.passing.kept)
                self._unit_grads(index, i, unit, last)
            else:
                w.add(s.later)
        if s.begin is not None:
            w.flash(s.begin.backward)
            w.add(-s.begin.kept)
        w.add(-grad)
        if not self.sharded and self._tied(s):  # both gradients of a tied table are added up before they go anywhere
            w.flash(s.head_grad)
            w.add(-s.head_grad)
        if whole:
            self._end(index, last)

    def _tied(self, s: Stage) -> bool:
        return bool(self.job.model.tied) and s.begin is not None and s.end is not None

    def _end(self, index: int, last: bool) -> None:
        """The gradients of what stands outside the blocks, and what one microbatch kept."""
        s, w = self.stages[index], self.walk
        if self._adds:
            w.add(-s.head_grad if (index, -1) not in self.graded else 0.0)
        elif self.sharded:
            w.add(s.root.gathered - s.head_grad)
        self._unit_grads(index, -1, s.root, last, made=True)
        w.add(-s.extra - (s.hidden if s.begin is None else 0.0))
        if last and self.sharded:
            w.add(-self.scattering)
            self.scattering = 0.0
            if not self._recuts:
                w.add(-sum(u.gathered for u in (*s.blocks, s.root)))
                self.ready.discard(index)

    def weights(self, index: int, last: bool) -> None:
        """The second half of a split backward pass."""
        s, w = self.stages[index], self.walk
        for i in reversed(range(len(s.blocks))):
            w.add(-s.blocks[i].passing.kept - s.later)
            self._unit_grads(index, i, s.blocks[i], last)
        self._end(index, last)

    def _grads(self, index: int, number: int, made: float, lasting: float) -> None:
        """Gradients of a unit without shards: they stay in fp32, or are added to those that are there."""
        w = self.walk
        if self.buckets or (index, number) in self.graded:
            w.add(-made)
        else:
            self.graded.add((index, number))
            w.add(lasting - made)

    def _unit_grads(self, index: int, number: int, unit: Unit, last: bool, made: bool = False) -> None:
        w = self.walk
        if not self.sharded:
            apart = number == -1 and not self._tied(self.stages[index])
            size = unit.gathered - (self.stages[index].head_grad if apart else 0.0)
            w.add(size)
            self._grads(index, number, size, size)
            return
        if self._adds:
            self._in_place(index, number, unit, last)
            return
        if not made:
            w.add(unit.gathered)
        key, scatter = (index, number), 1 if (last or (self.plan.zero > 1 and not self.split)) else 0
        if not scatter:  # whole gradients wait in fp32
            if key not in self.graded:
                self.graded.add(key)
                w.add(unit.elements * FLOAT)
            w.add(-unit.gathered)
            return
        waited = key in self.graded and (self.plan.zero == 1 or self.split)
        if self._recuts:
            w.add(-unit.gathered)
        w.add(-self.scattering)
        self.scattering = unit.elements * FLOAT
        w.add(self.scattering)
        w.add(-unit.gathered - (unit.elements * FLOAT if waited else 0.0))
        fresh = waited or key not in self.graded
        self.graded.add(key)
        if fresh:
            w.add(unit.cut * FLOAT)
        else:
            w.flash(unit.cut * FLOAT)

    def _in_place(self, index: int, number: int, unit: Unit, last: bool) -> None:
        """Whole fp32 gradients that autograd adds to in place, until the last microbatch cuts them."""
        w, key = self.walk, (index, number)
        if key not in self.graded:
            self.graded.add(key)
            w.add(unit.elements * FLOAT)
        if last:
            w.add(-self.scattering)
            self.scattering = unit.elements * FLOAT
            w.add(self.scattering)
            w.add(-unit.elements * FLOAT)
            w.add(unit.cut * FLOAT)
