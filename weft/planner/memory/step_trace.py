"""A walk through one step of one rank, unit by unit, with the live bytes on the way.

It follows the engine: units are gathered and cut as FSDP2 does it, microbatches wait as the schedule says, and
gradients come one unit after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.schema import Job
from weft.planner.engine_constants import PREFETCHED_MESSAGES
from weft.planner.memory.rank_bytes import FP32_BYTES, compute_bytes
from weft.planner.memory.units import Stage, Unit, make_stage
from weft.planner.model.parameters import coords_of, stages_of
from weft.planner.plan import Plan
from weft.planner.schedules.registry import make_schedule

FIRST_EXPERT_UNIT = -10
"""The number of the first block's experts, where they are a unit of their own; the next one's is one less."""


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


class Step:
    """One step of one rank, unit by unit."""

    def __init__(self, job: Job, plan: Plan, rank: int, walk: Walk, buckets: bool):
        self.job, self.plan, self.walk, self.buckets = job, plan, walk, buckets
        coords = coords_of(plan, rank)
        self.pp_rank = coords["pp"]
        self.stages = {s: make_stage(job, plan, s, coords) for s in stages_of(plan, coords["pp"])}
        self.sharded, self.c = plan.dp_shard > 1, compute_bytes(plan)
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
        at_once = plan.recompute == "full"  # a block that is computed again makes all its gradients in one pass
        final = {a.stage: i for i, a in enumerate(actions) if a.kind in ("BI" if at_once else "BW")}
        sources = {schedule.rank_of[o] for s in self.stages for o in (s - 1, s + 1) if 0 <= o < schedule.stages}
        one = next(iter(self.stages.values())).hidden
        self.walk.add(PREFETCHED_MESSAGES * one * len(sources - {self.pp_rank}))
        for i, action in enumerate(actions):
            last = final[action.stage] == i
            if action.kind == "F":
                self.forward(action.stage)
                continue
            if action.kind != "W":
                self.backward(action.stage, last, whole=at_once or action.kind == "B")
            elif not at_once:
                self.weights(action.stage, last)
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
            for part in _parts(unit) if self.sharded and index not in self.ready else ():
                w.flash(_copies(unit, part) * part.gathered)
                w.add(2 * part.gathered)  # the shards of the unit before are let go only now
                w.add(-before)
                before = part.gathered
            w.flash(unit.passing.forward)
            w.add(unit.passing.kept)
            if self._recuts:
                w.add(-unit.all_gathered)
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
        return self.sharded and self.c == FP32_BYTES and (self.plan.zero == 1 or self.split)

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
                self._grads(index, -2, s.head_grad, s.head_grad / self.c * FP32_BYTES)
        else:
            w.add(grad)
        for i in reversed(range(len(s.blocks))):
            unit = s.blocks[i]
            for part in _parts(unit) if self._recuts else ():
                w.flash(_copies(unit, part) * part.gathered - ahead)
                w.add(2 * part.gathered - ahead)
                before = s.blocks[i - 1].gathered if i else 0.0
                ahead = unit.apart.gathered if unit.apart and part is unit else before
                w.add(-part.gathered + ahead)
            w.flash(unit.passing.backward)
            if whole:
                self._block_grads(index, i, unit, last)
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
                w.add(-sum(u.all_gathered for u in (*s.blocks, s.root)))
                self.ready.discard(index)

    def weights(self, index: int, last: bool) -> None:
        """The second half of a split backward pass."""
        s, w = self.stages[index], self.walk
        for i in reversed(range(len(s.blocks))):
            w.add(-s.later)
            self._block_grads(index, i, s.blocks[i], last)
        self._end(index, last)

    def _grads(self, index: int, number: int, made: float, lasting: float) -> None:
        """Gradients of a unit without shards: they stay in fp32, or are added to those that are there."""
        w = self.walk
        if self.buckets or (index, number) in self.graded:
            w.add(-made)
        else:
            self.graded.add((index, number))
            w.add(lasting - made)

    def _block_grads(self, index: int, number: int, unit: Unit, last: bool) -> None:
        """A block lets go of what it kept; experts that are a unit of their own are done before the rest of it."""
        if unit.apart is not None:
            self.walk.add(-unit.passing.inner)
            self._unit_grads(index, FIRST_EXPERT_UNIT - number, unit.apart, last)
        self.walk.add(-unit.passing.kept + (unit.passing.inner if unit.apart else 0.0))
        self._unit_grads(index, number, unit, last)

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
                w.add(unit.elements * FP32_BYTES)
            w.add(-unit.gathered)
            return
        waited = key in self.graded and (self.plan.zero == 1 or self.split)
        if self._recuts:
            w.add(-unit.gathered)
        w.add(-self.scattering)
        self.scattering = unit.elements * FP32_BYTES
        w.add(self.scattering)
        w.add(-unit.gathered - (unit.elements * FP32_BYTES if waited else 0.0))
        self._scatter(unit)
        fresh = waited or key not in self.graded
        self.graded.add(key)
        if fresh:
            w.add(unit.cut * FP32_BYTES)
        else:
            w.flash(unit.cut * FP32_BYTES)

    def _in_place(self, index: int, number: int, unit: Unit, last: bool) -> None:
        """Whole fp32 gradients that autograd adds to in place, until the last microbatch cuts them."""
        w, key = self.walk, (index, number)
        if key not in self.graded:
            self.graded.add(key)
            w.add(unit.elements * FP32_BYTES)
        if last:
            w.add(-self.scattering)
            self.scattering = unit.elements * FP32_BYTES
            w.add(self.scattering)
            w.add(-unit.elements * FP32_BYTES)
            self._scatter(unit)
            w.add(unit.cut * FP32_BYTES)

    def _scatter(self, unit: Unit) -> None:
        """Gloo copies what it is to sum and cut, and FSDP2 what a rank alone holds."""
        if self.plan.backend == "gloo" or unit.cut == unit.elements:
            self.walk.flash(self.scattering + unit.cut * FP32_BYTES)


def _parts(unit: Unit) -> tuple[Unit, ...]:
    """What of a block is gathered at once, in the order of the forward pass."""
    return (unit,) if unit.apart is None else (unit, unit.apart)


def _copies(unit: Unit, part: Unit) -> int:
    """Experts are not cut along their first dim, so what arrives is put into order once more."""
    return 3 if part is unit.apart else 2
