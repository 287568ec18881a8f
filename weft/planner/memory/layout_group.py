"""One rank of layouts with the same flags: its states and units, and the trace of its step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from weft.hardware.probe import probe
from weft.job.schema import Job
from weft.job.shapes import PATCH_DIM
from weft.planner.engine_constants import LONG_SEQUENCE_CHUNK, PREFETCHED_MESSAGES
from weft.planner.memory.live_bytes import FP32_BYTES, PassBytes
from weft.planner.memory.peak_walk import Walk
from weft.planner.memory.stage_blocks import V_SHAPED
from weft.planner.memory.states import UnitSizes
from weft.planner.memory.step_trace import Regime, Stage, StepTrace, Unit
from weft.planner.memory.unit_passes import Passes, PassTables
from weft.planner.model.facts import Size
from weft.planner.rules.context_rules import attends, has_short_window
from weft.planner.schedules.registry import SCHEDULE_NAMES, SCHEDULES
from weft.planner.search.candidates import OFFLOADS, RECOMPUTES, Layouts
from weft.planner.search.space import MAX_MICROBATCH_TOKENS
from weft.planner.time.compression import residual_bytes

GIB = 2**30
HOST_SHARE = 0.7
"""Share of a host's memory for offloaded states and activations."""
LOW_HALF_BYTES = 2
"""Of a split master weight, besides its compute weight."""
RUNTIME_BYTES = {"cpu": 0.35 * GIB, "cuda": 0.0}
"""torch itself, resident on a CPU rank. The context of a GPU is not part of what its allocator counts."""
WORKSPACE_BYTES = 0.3 * GIB
"""Scratch of cuBLAS and cuDNN in compiled blocks."""
ALL_FORWARD_FIRST = np.array([name == "gpipe" for name in SCHEDULE_NAMES])
"""By the code of a schedule: whether all microbatches pass forward before the first backward pass."""
SPLITS = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE_NAMES])
"""By the code of a schedule: whether it computes gradients of weights separately."""


class LayoutGroup:
    """Layouts with the same flags, and their units on one rank."""

    def __init__(
        self, tables: PassTables, layouts: Layouts, flags: dict[str, Any], at: Size, units: dict[str, UnitSizes]
    ):
        self.tables, self.job, self.plan = tables, tables.job, tables.plan
        self.layouts, self.flags, self.at, self.units = layouts, flags, at, units
        self.compute_bytes = FP32_BYTES if flags["fp32"] else 2
        self.begins = (at == 0) * 1.0
        back = V_SHAPED[layouts.schedule] & (layouts.pp > 1)
        self.ends = np.where(back, at == 0, at == layouts.pp - 1) * 1.0
        self.tied = self.ends * (bool(self.job.model.tied) & (layouts.pp == 1))
        """1 where the head is the embedding; pipeline stages have a copy each."""

    def trace(self, blocks: Size, dense: Size, again: Size, detail: bool) -> Walk:
        layouts, flags = self.layouts, self.flags
        sharded = flags["zero"] > 0
        regime = Regime(
            sharded=sharded, zero=flags["zero"], splits=flags["splits"], split_passes=flags["split_passes"],
            gathers_again=flags["zero"] == 3 and not flags["splits"], buckets=flags["buckets"],
            compute_bytes=self.compute_bytes, copies_reduced=self.plan.backend == "gloo",
        )  # fmt: skip
        held = self.held(blocks, dense)
        passes = self.tables.passes(layouts, flags)
        in_flight = microbatches_by_schedule("in_flight", layouts, self.at)
        pending = microbatches_by_schedule("pending", layouts, self.at)
        if flags["splits"] and not flags["split_passes"]:
            in_flight = microbatches_by_schedule("awaiting_backward", layouts, self.at)
        stage = self.stage(passes, blocks, dense, again, in_flight, pending)
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
        here = 1.0 - self.plan.host_share - self.plan.disk_share
        """Share of the states that live on the device."""
        masters = FP32_BYTES * (held.padded if sharded else held.whole)
        if self.plan.split_master:
            masters = LOW_HALF_BYTES * held.whole * here
        copies = 0.0 if sharded or flags["fp32"] else 2 * held.whole
        average = FP32_BYTES * held.held * here if job.train.ema else 0.0
        optimizer = np.where(layouts.offload == OFFLOADS.index("optimizer"), 0.0, held.optimizer)
        optimizer = optimizer * here + self.plan.stream_gib * GIB
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

    def stage(
        self, passes: Passes, blocks: Size, dense: Size, again: Size, in_flight: Size, pending: Size
    ) -> Stage:  # fmt: skip
        """The units of the rank. `again` of its blocks are recomputed where the layout gives their number."""
        layouts, u = self.layouts, self.units
        mlp = self.job.model.is_stack
        some = layouts.recompute_blocks >= 0
        again = np.where(some, again, blocks)
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


def microbatches_by_schedule(what: str, layouts: Layouts, index: Size) -> Size:
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
    if not attends(job) or job.model.experts is not None or has_short_window(job):
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
