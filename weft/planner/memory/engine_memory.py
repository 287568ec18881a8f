"""Memory of a rank of Weft's engine by component, for many layouts at once.

States are exact; the rest is the peak of a trace through one step (step_trace.py). `weft dryrun` traces the real engine
and is the independent check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from weft.hardware.probe import probe
from weft.job.schema import Job
from weft.job.shapes import PATCH_DIM
from weft.planner.engine_constants import LONG_SEQUENCE_CHUNK, PREFETCHED_MESSAGES
from weft.planner.memory.live_bytes import FP32_BYTES, PassBytes
from weft.planner.memory.stage_blocks import V_SHAPED, StageBlocks
from weft.planner.memory.states import UnitSizes, unit_sizes
from weft.planner.memory.step_trace import PARTS, Regime, Stage, StepTrace, Unit, Walk
from weft.planner.memory.unit_passes import Passes, PassTables
from weft.planner.model.facts import Size
from weft.planner.model.parameters import coords_of
from weft.planner.plan import Plan
from weft.planner.rules.context_rules import attends
from weft.planner.schedules.registry import SCHEDULE_NAMES, SCHEDULES
from weft.planner.search.candidates import OFFLOADS, RECOMPUTES, Layouts
from weft.planner.search.space import MAX_MICROBATCH_TOKENS
from weft.planner.time.compression import residual_bytes

GIB = 2**30
HOST_SHARE = 0.7
"""Share of a host's memory for offloaded activations."""
RUNTIME_BYTES = {"cpu": 0.35 * GIB, "cuda": 0.0}
"""torch itself, resident on a CPU rank. The context of a GPU is not part of what its allocator counts."""
WORKSPACE_BYTES = 0.3 * GIB
"""Scratch of cuBLAS and cuDNN in compiled blocks."""
ALL_FORWARD_FIRST = np.array([name == "gpipe" for name in SCHEDULE_NAMES])
"""By the code of a schedule: whether all microbatches pass forward before the first backward pass."""
SPLITS = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE_NAMES])
"""By the code of a schedule: whether it computes gradients of weights separately."""


@dataclass(frozen=True)
class Place:
    """The rank whose memory is counted; by default the first of every axis but pp, which holds most."""

    pp: Size
    tp: int = 0
    shard: int = 0

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Place:
        """Where a rank of a plan is."""
        coords = coords_of(plan, rank)
        return cls(np.array([coords["pp"]]), coords["tp"], coords["dp_shard"] * plan.cp + coords["cp"])


class EngineMemory:
    """Memory of a job's layouts. `plan` has what the search does not choose: device, backend, precision and so on."""

    def __init__(self, job: Job, plan: Plan, traced: bool = False):
        self.job, self.plan = job, plan
        self.stages = StageBlocks(job)
        self.device = "cpu" if traced else plan.device
        """Where the loss is computed; a dry run traces on the CPU, without compiling."""
        self.compile = False if traced else job.train.compile
        self.tables = PassTables(job, plan, self.device)

    def compiled(self, layouts: Layouts) -> Size:
        """Which layouts compile their blocks: by default on GPUs where no collective is inside a block."""
        if self.compile != "auto" or self.job.model.is_stack or self.plan.device != "cuda":
            return np.full(len(layouts), self.compile is True and self.plan.device == "cuda")
        return (layouts.tp == 1) & (layouts.cp == 1)

    def peak(self, layouts: Layouts) -> Size:
        """Bytes of the fullest rank."""
        return self._fullest(layouts, detail=False)["total"]

    def parts(self, layouts: Layouts) -> dict[str, Size]:
        """Bytes by component of the fullest rank, when it holds most."""
        found = self._fullest(layouts, detail=True)
        return {part: found[part] for part in PARTS}

    def states(self, layouts: Layouts, place: Place) -> dict[str, Size]:
        """Bytes that one rank keeps between steps: exact, to the padding of shards."""
        ((chosen, flags),) = self._groups(layouts)
        units = _expanded(self.job, layouts, place)
        group = _Group(self, layouts.take(chosen), flags, np.broadcast_to(place.pp, 1), units)
        held = group.held(*self.stages.at(layouts, place.pp))
        sharded = flags["zero"] > 0
        return {
            "parameters": FP32_BYTES * (held.padded if sharded else held.whole),
            "copies": (0 if sharded or flags["fp32"] else 2) * held.whole, "gradients": group.gradients(held),
            "optimizer": held.optimizer, "average": FP32_BYTES * held.held * bool(self.job.train.ema),
        }  # fmt: skip

    def step_facts(self, layouts: Layouts, place: Place) -> dict[str, Size]:
        """Figures of one layout's rank: parameters before and after sharding, blocks, bytes that a block keeps on
        average, and microbatches in flight."""
        ((chosen, flags),) = self._groups(layouts)
        at = np.broadcast_to(place.pp, 1)
        group = _Group(self, layouts.take(chosen), flags, at, _expanded(self.job, layouts, place))
        blocks, dense = self.stages.at(layouts, place.pp)
        held, in_flight = group.held(blocks, dense), _by_schedule("in_flight", layouts, at)
        stage = group.stage(self.tables.passes(layouts, flags), blocks, dense, in_flight, 0.0 * in_flight)
        kept = sum(unit.passes.kept * count for unit, count in stage.blocks) / np.maximum(blocks, 1)
        return {"whole": held.whole, "held": held.held, "blocks": blocks, "kept": kept, "in_flight": in_flight}

    def keeps_low_precision_gradients(self, layouts: Layouts) -> bool:
        """Whether gradients of a layout stay in the compute dtype, as nothing is summed."""
        ((_, flags),) = self._groups(layouts)
        return bool(flags["alone"])

    def least(self, layouts: Layouts) -> Size:
        """Bytes that the fullest rank has at least, however the model is split into stages."""
        blocks = np.maximum((self.job.model.layers or 0) // layouts.pp, 1).astype(float)
        return self._rank(layouts, Place(np.zeros(len(layouts), np.int64)), detail=False, least=blocks)["total"]

    def rank(self, layouts: Layouts, place: Place) -> dict[str, Size]:
        """Bytes by component of one rank, when it holds most."""
        found = self._rank(layouts, place, detail=True)
        return {part: found[part] for part in PARTS}

    def _fullest(self, layouts: Layouts, detail: bool) -> dict[str, Size]:
        if self.plan.sync != "step":  # between exchanges every replica is by itself
            layouts = replace(layouts, dp_replicate=np.ones(len(layouts), np.int64))
        first, inverse = _unique(_memory_key(layouts))
        layouts = layouts.take(first)
        size = len(layouts)
        piped = np.flatnonzero(layouts.pp > 1)
        middle = self.stages.largest(layouts.take(piped))
        if self.plan.backend == "gloo":  # send buffers of ranks with two neighbours
            middle = np.where((middle == 0) & (layouts.pp[piped] > 2), 1, middle)
        inner = middle > 0
        which = np.concatenate([np.arange(size), piped, piped[inner]])
        at = np.concatenate([np.zeros(size, np.int64), layouts.pp[piped] - 1, middle[inner]])
        found = self._rank(layouts.take(which), Place(at), detail)
        best = np.arange(size)
        for some, offset in ((piped, size), (piped[inner], size + len(piped))):
            other = offset + np.arange(len(some))
            heavier = found["total"][other] > found["total"][best[some]]
            best[some] = np.where(heavier, other, best[some])
        return {part: held[best[inverse]] for part, held in found.items()}

    def _rank(self, layouts: Layouts, place: Place, detail: bool, least: Size | None = None) -> dict[str, Size]:
        names = ("total", *PARTS) if detail else ("total",)
        out = {name: np.zeros(len(layouts)) for name in names}
        units = _expanded(self.job, layouts, place)
        if least is None:
            blocks, dense = self.stages.at(layouts, place.pp)
        else:
            blocks, dense = (
                least,
                np.where(layouts.pp > 1, least if self.job.model.experts is None else 0.0, self.stages.first_dense),
            )
        for chosen, flags in self._groups(layouts):
            some = layouts.take(chosen)
            at = np.broadcast_to(place.pp, len(layouts))[chosen]
            group = _Group(self, some, flags, at, {k: u.take(chosen) for k, u in units.items()})
            if least is not None and flags["piped"]:
                group.begins, group.ends = 0.0 * group.begins, 0.0 * group.ends
            walk = group.trace(blocks[chosen], dense[chosen], detail)
            out["total"][chosen] = walk.peak
            for part, held in walk.at_peak.items():
                out[part][chosen] = held
        return out

    def _groups(self, layouts: Layouts) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Layouts whose flags are the same, traced together."""
        fp32 = layouts.precision == 0
        sharded = layouts.dp_shard > 1
        piped = layouts.pp > 1
        full = (layouts.recompute == RECOMPUTES.index("full")) & (layouts.recompute_blocks < 0)
        several = layouts.accumulation > 1
        splits = SPLITS[layouts.schedule] & piped
        alone = ~fp32 & (layouts.dp * layouts.cp * layouts.pp * layouts.accumulation == 1)
        again = several & fp32
        replicas = layouts.dp_replicate * layouts.cp > 1
        single = fp32 & (layouts.dp_replicate == 1)
        retain = np.where(sharded, ~(again & (layouts.zero == 1)), ~again & single)
        columns: dict[str, Any] = {
            "fp32": fp32, "tp": layouts.tp > 1, "sequence": layouts.sequence, "zero": layouts.zero * sharded,
            "piped": piped, "splits": splits, "split_passes": splits & ~full, "ep": layouts.ep > 1, "alone": alone,
            "buckets": ~sharded & (replicas | ~fp32) & ~alone, "retain": retain, "compiled": self.compiled(layouts),
            "long": self.is_long(layouts),
        }  # fmt: skip
        key = np.zeros(len(layouts), np.int64)
        for column in columns.values():
            key = key * 4 + column
        first, inverse = _unique(key)
        for number, i in enumerate(first):
            flags = {name: column[i].item() for name, column in columns.items()}
            yield (np.flatnonzero(inverse == number) if len(first) > 1 else slice(None)), flags

    def is_long(self, layouts: Layouts) -> Size:
        """Which layouts run blocks in chunks of tokens, or with their inputs offloaded to the host."""
        return (chunk_tokens(self.job, layouts) > 0) | (layouts.offload == OFFLOADS.index("activations"))


def _memory_key(layouts: Layouts) -> Any:
    """Equal for layouts whose memory is the same: placement and styles of cp do not matter."""
    columns = (
        layouts.dp_replicate > 1, layouts.dp_shard, layouts.zero, layouts.tp, layouts.sequence, layouts.cp, layouts.pp,
        layouts.virtual_stages, layouts.schedule, layouts.ep, layouts.microbatch, layouts.accumulation,
        layouts.recompute, layouts.recompute_blocks, layouts.offload, layouts.precision, layouts.compression,
    )  # fmt: skip
    key = np.zeros(len(layouts), np.uint64)
    for column in columns:  # a 64-bit hash
        key = (key ^ np.asarray(column).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def _unique(key: Any) -> tuple[Any, Any]:
    """First index of each value, and for each entry the position of its value."""
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse.ravel()


def _expanded(job: Job, layouts: Layouts, place: Place) -> dict[str, UnitSizes]:
    """Sizes of units, computed once for layouts that shard alike."""
    key = ((layouts.tp * 4096 + layouts.ep) * 65_536 + layouts.dp_shard * layouts.cp) * 4
    key = key + 2 * (layouts.dp_shard > 1) + layouts.sequence
    first, inverse = _unique(key)
    found = unit_sizes(job, layouts.take(first), place.tp, place.shard)
    return {kind: sizes.take(inverse) for kind, sizes in found.items()}


class _Group:
    """Layouts with the same flags, and their units on one rank."""

    def __init__(self, memory: EngineMemory, layouts: Layouts, flags: dict[str, Any], at: Size, units: dict[str, Any]):
        self.memory, self.job, self.plan = memory, memory.job, memory.plan
        self.layouts, self.flags, self.at, self.units = layouts, flags, at, units
        self.compute_bytes = FP32_BYTES if flags["fp32"] else 2
        self.begins = (at == 0) * 1.0
        back = V_SHAPED[layouts.schedule] & (layouts.pp > 1)
        self.ends = np.where(back, at == 0, at == layouts.pp - 1) * 1.0
        self.tied = self.ends * (bool(self.job.model.tied) & (layouts.pp == 1))
        """1 where the head is the embedding; pipeline stages have a copy each."""

    def trace(self, blocks: Size, dense: Size, detail: bool) -> Walk:
        layouts, flags = self.layouts, self.flags
        sharded = flags["zero"] > 0
        regime = Regime(
            sharded=sharded, zero=flags["zero"], splits=flags["splits"], split_passes=flags["split_passes"],
            gathers_again=flags["zero"] == 3 and not flags["splits"], buckets=flags["buckets"],
            compute_bytes=self.compute_bytes, copies_reduced=self.plan.backend == "gloo",
        )  # fmt: skip
        held = self.held(blocks, dense)
        passes = self.memory.tables.passes(layouts, flags)
        in_flight = _by_schedule("in_flight", layouts, self.at)
        pending = _by_schedule("pending", layouts, self.at)
        if flags["splits"] and not flags["split_passes"]:
            in_flight = _by_schedule("awaiting_backward", layouts, self.at)
        stage = self.stage(passes, blocks, dense, in_flight, pending)
        gradients = self.gradients(held)
        base = self._states(held)
        lasting = sum(base.values())
        start = {**base, "gradients": gradients if flags["buckets"] else 0.0 * gradients}
        start["activations"] = layouts.accumulation * self._batch_bytes()
        neighbours = _neighbours(layouts, self.at)
        start["communication"] = start["communication"] + PREFETCHED_MESSAGES * stage.hidden * neighbours
        walk = Walk(start, detail)
        sent = 0.0 * stage.hidden
        if self.plan.backend == "gloo" and flags["piped"]:  # a send is known to be complete only when waited for
            local = 2 * (V_SHAPED[layouts.schedule] & (self.at == layouts.pp - 1))
            sent = stage.hidden * (2 * layouts.virtual_stages - self.begins - self.ends - local)
        StepTrace(stage, regime, walk).run(
            in_flight, pending, layouts.accumulation, flags["piped"], sent, ALL_FORWARD_FIRST[layouts.schedule]
        )
        after = np.maximum(held.scratch, self._partial_gradients(held))
        walk.on, walk.live = None, lasting + gradients
        walk.parts = {p: base.get(p, 0.0) + 0.0 * lasting for p in walk.parts}
        if detail:
            walk.parts["gradients"] = gradients
        walk.flash(after)
        return walk

    def held(self, blocks: Size, dense: Size) -> UnitSizes:
        """Sizes of everything on the rank."""
        u = self.units
        if self.job.model.is_stack:
            alone = self.ends * ((self.job.model.layers or 0) % 2)
            pairs = (blocks - alone) / 2
            columns = np.ceil(pairs)
            return u["column"].times(columns) + u["row"].times(blocks - alone - columns) + u["whole"].times(alone)
        routed = u["routed"].times(blocks - dense) + u["experts"].times(blocks - dense)
        return u["dense"].times(dense) + routed + self._ends()

    def _ends(self) -> UnitSizes:
        """Sizes of what is outside the blocks."""
        u = self.units
        return u["begin"].times(self.begins) + u["norm"].times(self.ends) + u["head"].times(self.ends - self.tied)

    def _states(self, held: UnitSizes) -> dict[str, Size]:
        """Bytes that last from step to step, without gradients."""
        job, layouts, flags = self.job, self.layouts, self.flags
        sharded = flags["zero"] > 0
        masters = FP32_BYTES * (held.padded if sharded else held.whole)
        copies = 0.0 if sharded or flags["fp32"] else 2 * held.whole
        average = FP32_BYTES * held.held if job.train.ema else 0.0
        optimizer = np.where(layouts.offload == OFFLOADS.index("optimizer"), 0.0, held.optimizer)
        if self.plan.alone:  # the last shared weights, and DiLoCo's momentum
            outer = 2 if self.plan.sync == "diloco" else int(job.train.sync.quantize != "none")
            optimizer = optimizer + outer * FP32_BYTES * held.held
        runtime = RUNTIME_BYTES[self.plan.device] + (WORKSPACE_BYTES if flags["compiled"] else 0.0)
        return {
            "parameters": masters + copies + average, "optimizer": optimizer,
            "communication": residual_bytes(layouts) * held.compressed, "runtime": runtime + 0.0 * held.whole,
        }  # fmt: skip

    def gradients(self, held: UnitSizes) -> Size:
        """Bytes of gradients after the backward pass."""
        if self.flags["zero"] > 0:
            return FP32_BYTES * held.padded
        if self.flags["alone"]:
            return 2 * held.whole
        return FP32_BYTES * (held.aligned if self.flags["buckets"] else held.whole)

    def stage(self, passes: Passes, blocks: Size, dense: Size, in_flight: Size, pending: Size) -> Stage:
        layouts, u = self.layouts, self.units
        mlp = self.job.model.is_stack
        some = layouts.recompute_blocks >= 0
        again = np.where(some, np.minimum(layouts.recompute_blocks, blocks), blocks)
        code = np.where(some, RECOMPUTES.index("full"), layouts.recompute)
        again = np.where(code == 0, 0.0, again)
        routed = blocks - dense
        again_routed = np.minimum(again, routed)
        again_dense = again - again_routed
        parts = [
            (self._unit(u["column" if mlp else "dense"], passes.dense.none), dense - again_dense),
            (self._unit(u["column" if mlp else "dense"], passes.dense.chosen(code)), again_dense),
        ]
        if passes.routed is not None:
            parts += [
                (self._unit(u["routed"], passes.routed.none, u["experts"]), routed - again_routed),
                (self._unit(u["routed"], passes.routed.chosen(code), u["experts"]), again_routed),
            ]
        kinds = [(unit, count) for unit, count in parts if np.any(count > 0)]
        if np.any(layouts.offload == OFFLOADS.index("activations")):
            kinds = self._offloaded(kinds, in_flight)
        root = self._unit(UnitSizes.none(len(layouts)) if mlp else self._ends(), PassBytes(0.0, 0.0, 0.0))
        stages = np.where(layouts.pp > 1, layouts.virtual_stages, 1)
        head_grad = passes.head_grad * self.ends
        return Stage(
            tuple(kinds), root, _scaled(passes.begin, self.begins), _scaled(passes.end, self.ends), head_grad,
            head_grad * self.tied, passes.hidden, passes.hidden * (stages - self.begins),
            passes.per_microbatch * stages, passes.later * (pending > 0),
        )  # fmt: skip

    def _offloaded(self, kinds: list[tuple[Unit, Size]], in_flight: Size) -> list[tuple[Unit, Size]]:
        """The same with as much of what blocks keep in host memory as it has space for."""
        total = in_flight * sum(unit.passes.kept * count for unit, count in kinds)
        offloads = self.layouts.offload == OFFLOADS.index("activations")
        host = host_gib(self.job, self.layouts) * GIB
        stays = np.where(offloads, 1 - np.minimum(1.0, host / np.maximum(total, 1.0)), 1.0)
        return [
            (replace(unit, passes=replace(unit.passes, kept=unit.passes.kept * stays)), count) for unit, count in kinds
        ]

    def _unit(self, sizes: UnitSizes, passes: PassBytes, experts: UnitSizes | None = None) -> Unit:
        c = self.compute_bytes
        apart = None
        if experts is not None and self.flags["ep"] and self.flags["zero"] > 0:
            apart = Unit(experts.gathered * c, experts.gathered, experts.padded, PassBytes(0.0, 0.0, 0.0))
        elif experts is not None:
            sizes = sizes + experts
        return Unit(sizes.gathered * c, sizes.gathered, sizes.padded, passes, apart)

    def _batch_bytes(self) -> Size:
        """One microbatch of data: ids, inputs, targets, valid and, where documents are masked, theirs."""
        model, size, seq = self.job.model, self.layouts.microbatch, self.job.data.seq_len
        if model.is_stack:
            return size * (8.0 + 2 * FP32_BYTES * (model.dim or 0) + 1)
        if model.is_classifier:
            return size * (8.0 + FP32_BYTES * seq * PATCH_DIM + 8 + 1)
        return size * (8.0 + seq * (8 + 8 + 1 + (16 if self.job.data.mask_documents else 0)))

    def _partial_gradients(self, held: UnitSizes) -> Size:
        """Gradients that are summed over tp after the last pass are sent together (parallel/spread_model.py)."""
        width = self.compute_bytes if self.flags["alone"] else FP32_BYTES
        return np.where(self.layouts.tp > 1, width * held.partial, 0.0)


def _scaled(passes: PassBytes, mask: Size) -> PassBytes:
    return PassBytes(passes.kept * mask, passes.forward * mask, passes.backward * mask, passes.inner)


def _by_schedule(what: str, layouts: Layouts, index: Size) -> Size:
    """Microbatches, each over all blocks of pipeline rank `index`: held at once (`in_flight`), of these with gradients
    of weights still to be computed (`pending`), or held before their backward pass (`awaiting_backward`)."""
    pp, count, v = layouts.pp, layouts.accumulation, layouts.virtual_stages
    entries = [SCHEDULES[name] for name in SCHEDULE_NAMES]
    each = [np.asarray((getattr(e, what) or e.in_flight)(pp, v, index, count), float) + 0 * pp for e in entries]
    alone = 0.0 if what == "pending" else 1.0
    return np.where(pp > 1, np.minimum(np.choose(layouts.schedule, each), count), alone)


def _neighbours(layouts: Layouts, index: Size) -> Size:
    """Ranks that a pipeline rank exchanges messages with."""
    pp = layouts.pp
    inner = (index > 0) & (index < pp - 1)
    around = (layouts.virtual_stages > 1) & ~V_SHAPED[layouts.schedule] & (pp > 2)
    return np.where(pp > 1, np.where(inner | around, 2.0, 1.0), 0.0)


def chunk_tokens(job: Job, layouts: Layouts) -> Size:
    """Tokens of a sequence that pass through a block's linear layers at once; 0: all of them."""
    if job.memory.chunk != "auto":
        return np.full(len(layouts), job.memory.chunk)
    long = job.data.seq_len / layouts.cp > MAX_MICROBATCH_TOKENS
    if not attends(job) or job.model.experts is not None:
        return np.zeros(len(layouts), np.int64)
    return np.where(long & ~(SPLITS[layouts.schedule] & (layouts.pp > 1)), LONG_SEQUENCE_CHUNK, 0)


def host_gib(job: Job, layouts: Layouts) -> Size:
    """Host memory of a rank for offloaded activations."""
    if job.memory.host_gib is not None:
        return np.full(len(layouts), job.memory.host_gib)
    return HOST_SHARE * _host_memory_gib() * job.cluster.nodes / layouts.world


@cache
def _host_memory_gib() -> float:
    return probe().memory_gib
