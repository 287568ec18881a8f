"""One rank of layouts with the same flags: its states and units, and the trace of its step."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from weft.hardware.probe import GIB
from weft.job.optim import OPTIMIZERS
from weft.planner.engine_constants import CODED_ELEMENTS, PREFETCHED_MESSAGES, STREAMED_PIECE_ELEMENTS, WEIGHT_UNITS
from weft.planner.memory.compressed_bytes import CompressedLayouts
from weft.planner.memory.layout_ranks import Rank, SharedTables
from weft.planner.memory.live_bytes import FP32_BYTES, PassBytes
from weft.planner.memory.long_sequences import host_gib
from weft.planner.memory.peak_walk import Walk
from weft.planner.memory.states import OUTSIDE_BLOCKS, UnitSizes, low_half_bytes, piece_elements
from weft.planner.memory.step_trace import StepTrace
from weft.planner.memory.step_units import Regime, Stage, Unit
from weft.planner.memory.unit_passes import Passes, PassTables
from weft.planner.model.model_facts import Size
from weft.planner.search.candidates import OFFLOADS, distinct

CODING_BYTES = 64
"""Temporary bytes for each element of a state while it is encoded."""
RUNTIME_BYTES = {"cpu": 0.35 * GIB, "cuda": 0.0}
"""torch itself, resident on a CPU rank. The context of a GPU is not part of what its allocator counts."""
WORKSPACE_BYTES = 0.3 * GIB
"""Scratch of cuBLAS and cuDNN in compiled blocks."""
NO_PASSES = PassBytes(0.0, 0.0, 0.0)


class LayoutGroup:
    """A rank of layouts with the same flags."""

    def __init__(
        self, tables: PassTables, rank: Rank, flags: dict[str, Any], units: dict[str, UnitSizes], least: bool = False
    ):
        self.tables, self.job, self.plan = tables, tables.job, tables.plan
        self.rank, self.layouts, self.flags, self.units = rank, rank.layouts, flags, units
        self.compute_bytes = FP32_BYTES if flags["fp32"] else 2
        at, layouts = rank.at, rank.layouts
        piped, tied = layouts.pp > 1, bool(self.job.model.tied)
        outer = 1.0 - (piped & least)
        self.begins = (at == 0) * outer
        self.ends = (at == np.where(layouts.back_and_forth, 0, layouts.pp - 1)) * outer
        """`begins` and `ends` are 1 on ranks with the embedding and with the head, else 0; the `least` that a rank of a
        pipeline holds is neither."""
        self.tied = self.ends * (tied & ~piped)
        """1 where the head is the embedding; pipeline stages have a copy each."""
        self.twin = self.begins * self.ends * (tied & piped)
        """1 where the rank has both copies: the optimizer updates the embedding only."""

    def take(self, chosen: Any, flags: dict[str, Any]) -> LayoutGroup:
        """The same for some of the layouts, with their flags."""
        part = copy(self)
        part.__dict__ = {
            name: value for name, value in part.__dict__.items() if name not in ("unit_here", "outside", "held")
        }
        part.rank, part.flags = self.rank.take(chosen), flags
        part.layouts = part.rank.layouts
        part.begins, part.ends, part.tied, part.twin = (
            x[chosen] for x in (self.begins, self.ends, self.tied, self.twin)
        )
        return part

    def shared(self) -> SharedTables:
        """What the layouts have in common."""
        return SharedTables(*self._distinct(), *self.tables.columns(self.layouts, self.flags))

    def _passes(self, shared: SharedTables, chosen: slice) -> Passes:
        flags = self.flags["partly"], self.flags["split_passes"]
        return Passes.from_table(shared.passes, shared.columns[chosen], self.layouts.recompute, *flags)

    def trace(self, detail: bool, shared: SharedTables, chosen: slice) -> Walk:
        """The walk through a step; the layouts are the `chosen` ones of a group that has the tables."""
        layouts, flags, rank = self.layouts, self.flags, self.rank
        states = shared.states_of(chosen)
        regime = Regime(
            zero=flags["zero"], split_passes=flags["split_passes"], reduces_last=flags["reduces_last"],
            buckets=flags["buckets"], several=flags["several"], steady=flags["steady"],
            compute_bytes=self.compute_bytes,
            copies_reduced=self.plan.backend == "gloo" or self.plan.compression != "none",
            gradients_leave=self.plan.gradient_home != "device",
            updates=states["block update"] if self.plan.gradient_home == "released" else None,
        )  # fmt: skip
        stage = self.stage(self._passes(shared, chosen), states)
        between = {part: states[part] for part in ("parameters", "optimizer", "communication")}
        between["runtime"] = RUNTIME_BYTES[self.plan.device] + (WORKSPACE_BYTES if flags["compiled"] else 0.0)
        messages = PREFETCHED_MESSAGES * stage.hidden * rank.neighbours if flags["piped"] else 0.0
        batches = {"activations": layouts.accumulation * (layouts.microbatch * self.tables.sample_bytes)}
        before = {"gradients": states["gradients"] * flags["buckets"], **batches}
        walk = Walk({**between, **before, "communication": between["communication"] + messages}, detail)
        sent = 0.0
        if self.plan.backend == "gloo" and flags["piped"]:  # a send is known to be complete only when waited for
            local = 2 * (layouts.back_and_forth & (rank.at == layouts.pp - 1))
            sent = stage.hidden * (2 * layouts.virtual_stages - self.begins - self.ends - local)
        step = StepTrace(stage, regime, walk)
        step.run(rank, flags["piped"], sent)
        if regime.reduces_last:
            step.reduce_last({**between, **batches})
        # what the last step did not send is kept until this one is known to be taken
        kept = between["communication"] + states["not sent before"]
        walk.restart({**between, "gradients": states["gradients"], "communication": kept})
        walk.flash(states["update"])
        return walk

    @cached_property
    def held(self) -> UnitSizes:
        """Sizes of everything on the rank."""
        u, (blocks, dense, *_) = self.unit_here, self.rank.counts
        if self.job.model.takes_vectors:
            alone = self.ends * ((self.job.model.layers or 0) % 2)
            pairs = (blocks - alone) / 2
            columns = np.ceil(pairs)
            return u["column"].times(columns) + u["row"].times(blocks - alone - columns) + u["whole"].times(alone)
        sizes = u["dense"].times(dense) + self.outside
        return (
            sizes if self.job.model.first_blocks is None else sizes + (u["routed"] + u["experts"]).times(blocks - dense)
        )

    @cached_property
    def unit_here(self) -> dict[str, UnitSizes]:
        """Sizes of each kind of unit, one column for each layout."""
        return {kind: sizes.take(self.rank.position) for kind, sizes in self.units.items()}

    @cached_property
    def outside(self) -> UnitSizes:
        """Sizes of what is outside the blocks; nothing for a stack of layers."""
        if self.job.model.takes_vectors:
            return UnitSizes.none(len(self.layouts))
        u = self.unit_here
        sizes = (
            u["begin"].times(self.begins)
            + u["norm"].times(self.ends)
            + u["head"].times(self.ends - self.tied - self.twin)
        )
        return sizes + u["head"].times(self.twin).without_states() if self.twin.any() else sizes

    def _distinct(self) -> tuple[tuple[str, ...], Any, Size]:
        """Names and rows of bytes that last from step to step and of elements of units, with a column for each way in
        which layouts differ in them; and the way of each layout.

        `update` are the bytes of temporary tensors after the last pass: of the optimizer, or of gradients that are
        summed over tp and sent together (parallel/spread_model.py).
        """
        rank, layouts = self.rank, self.layouts
        first, where = distinct(
            rank.position, rank.counts.blocks, rank.counts.dense, self.begins, self.ends, layouts.offload,
            layouts.compression, layouts.dp * layouts.cp > 1, layouts.pp > 1,
        )  # fmt: skip
        states = self.take(first, self.flags)._distinct_states()
        return tuple(states), np.stack([np.broadcast_to(size, len(first)) for size in states.values()]), where

    def _distinct_states(self) -> dict[str, Size]:
        job, layouts, held = self.job, self.layouts, self.held
        bytes_ = self.states(held)
        here = {kind: 1.0 - sum(self.plan.shares_of(kind).values()) for kind in ("master", "moments", "averages")}
        """Share of the states of each kind that live on the device."""
        masters = (
            low_half_bytes(self.plan.states) * held.trained_whole * here["master"]
            if self.plan.split_master
            else bytes_["parameters"]
        )
        optimizer = np.where(layouts.offload == OFFLOADS.index("optimizer"), 0.0, bytes_["optimizer"])
        optimizer = optimizer * here["moments"] + self.plan.stream_gib * GIB
        if self.plan.alone:  # the last shared weights, and DiLoCo's momentum
            outer = 2 if self.plan.sync == "diloco" else int(job.train.sync.quantize != "none")
            optimizer = optimizer + outer * FP32_BYTES * held.trained_held
        if self.plan.sync == "predict":  # the true weights and states, the sum in flight and two averages
            optimizer = optimizer + bytes_["optimizer"] + 4 * FP32_BYTES * held.trained_held
        width = self.compute_bytes if self.flags["alone"] else FP32_BYTES
        blocks, largest = self.block_weights()
        away = self.plan.weight_share * blocks  # in host memory, but for two blocks
        compressed = self.compressed()
        not_sent = 0.0 if compressed is None else compressed.residual * held.compressed
        out = {
            "parameters": masters + bytes_["frozen"] + bytes_["copies"] + bytes_["average"] * here["averages"]
            - (away - np.minimum(away, WEIGHT_UNITS * largest)),
            "optimizer": optimizer,
            "communication": not_sent + (0.0 if compressed is None else compressed.noise),
            "not sent before": not_sent,
            "gradients": bytes_["gradients"] - self.block_gradients(),
            "update": np.maximum(held.updating, (width if self.flags["tp"] else 0) * held.partial),
        }  # fmt: skip
        if self.flags["alone"] and not self.plan.tiered and not self._fused:  # torch's optimizers take them in fp32
            out["update"] += FP32_BYTES * held.trained_whole
        if self.plan.gradient_home == "host":  # those of the pieces that are updated and come next
            out["update"] += 2 * width * np.minimum(held.held, STREAMED_PIECE_ELEMENTS)
        if self.plan.tiered:
            out["update"] += self._piece_bytes(held.held)
        out["update"] = np.maximum(out["update"], held.scratch[1])
        if compressed is not None and self.flags["buckets"]:
            out["update"] = np.maximum(out["update"], compressed.summing(held.compressed, self._largest_compressed()))
        if self.plan.gradient_home == "released":
            scratch = [size.updating for kind, size in self.unit_here.items() if kind not in OUTSIDE_BLOCKS]
            out["block update"] = np.max(scratch, 0) + self._piece_bytes(held.held, blocks=True)
        u = self.unit_here
        kinds = {"dense": u["column" if job.model.takes_vectors else "dense"], "root": self.outside}
        if job.model.first_blocks is not None:
            apart = self.flags["ep"] and self.flags["sharded"]
            kinds |= {"routed": u["routed"] if apart else u["routed"] + u["experts"]}
            kinds |= {"experts": u["experts"]} if apart else {}
        rows = ["gathered", "trained_gathered", "trained_padded"]
        rows += ["last"] * self.flags["sharded"] + ["compressed"] * (compressed is not None)
        return out | {f"{kind} {row}": getattr(sizes, row) for kind, sizes in kinds.items() for row in rows}

    def compressed(self) -> CompressedLayouts | None:
        """How gradients are compressed; None where they are not."""
        if self.plan.compression == "none":
            return None
        return CompressedLayouts(self.job, self.plan, self.layouts, self.tables.device, self.compute_bytes)

    def _largest_compressed(self) -> Size:
        """Numbers of the embedding or of the head, which are summed by themselves where they exceed a bucket."""
        ends = [self.unit_here[kind].compressed for kind in ("begin", "head") if kind in self.unit_here]
        return np.max(ends, 0) if ends else 0.0

    @property
    def _fused(self) -> bool:
        """Whether one kernel updates a weight from its gradient as it is."""
        return self.plan.device == "cuda" and self.job.optim.name == "adamw"

    def _piece_bytes(self, held: Size, blocks: bool = False) -> Size:
        """Temporary bytes of the update of a piece: its master weights and gradients in fp32 if they are not, and its
        states if they are decoded and encoded."""
        piece, plan, optim = piece_elements(self.job, self.plan.world, held, blocks), self.plan, self.job.optim
        size = 2 * FP32_BYTES * piece * (plan.split_master and not self._fused)
        if plan.states == "exact":
            return size
        moments = OPTIMIZERS[optim.name].state_per_parameter(optim)
        return size + FP32_BYTES * moments * piece + CODING_BYTES * np.minimum(piece, CODED_ELEMENTS)

    def block_gradients(self) -> Size:
        """Bytes of gradients that are not kept on the device."""
        if self.plan.gradient_home == "device":
            return 0.0
        return self.states(self.held)["gradients"] - self.states(self.outside)["gradients"]

    def block_weights(self) -> tuple[Size, Size]:
        """Bytes of the weights of all blocks and of the largest one, with fp32 master weights that are copies."""
        if self.flags["sharded"]:
            return 0.0, 0.0
        masters = 0 if self.flags["fp32"] or self.plan.split_master else FP32_BYTES

        def size(unit: UnitSizes) -> Size:
            return self.compute_bytes * unit.whole + masters * unit.trained_whole

        u = self.unit_here
        if self.job.model.takes_vectors:
            return size(self.held), np.max([size(u[kind]) for kind in ("column", "row", "whole")], 0)
        largest = size(u["dense"]) * (self.rank.counts.dense > 0)
        if self.job.model.first_blocks is not None:
            largest = np.maximum(largest, size(u["routed"] + u["experts"]))
        return size(self.held) - size(self.outside), largest

    def states(self, held: UnitSizes) -> dict[str, Size]:
        """Bytes that a rank keeps between steps: exact, to the padding of shards."""
        sharded, fp32 = self.flags["sharded"], self.flags["fp32"]
        if sharded:
            gradients = FP32_BYTES * held.trained_padded
        elif self.flags["alone"]:
            gradients = 2 * held.trained_whole
        else:
            gradients = FP32_BYTES * (held.aligned if self.flags["buckets"] else held.trained_whole)
        return {
            "parameters": FP32_BYTES * (held.trained_padded if sharded else held.trained_whole),
            "frozen": self.compute_bytes
            * (held.padded - held.trained_padded if sharded else held.whole - held.trained_whole),
            "copies": (0 if sharded or fp32 else 2) * held.trained_whole, "gradients": gradients,
            "optimizer": held.optimizer, "average": FP32_BYTES * held.trained_held * bool(self.job.train.ema),
        }  # fmt: skip

    def stage(self, passes: Passes, states: dict[str, Size]) -> Stage:
        """The units of the rank."""
        layouts, flags, (blocks, dense, again, again_waiting, *_) = self.layouts, self.flags, self.rank.counts
        again, again_waiting = ((layouts.recompute > 0) * each for each in (again, again_waiting))
        compressed = self.compressed()
        stages = split_stages = layouts.virtual_stages if flags["piped"] else 1
        beside: Size = 0.0
        if flags["split_passes"] and flags["partly"]:  # stages with recomputed blocks do not split their backward pass
            at_once = self.rank.counts.at_once
            beside = np.maximum(at_once - again, 0)
            split_stages = stages * np.maximum(blocks - at_once, 1) / np.maximum(blocks, 1)

        def unit(kind: str, passes: PassBytes = NO_PASSES, experts: Unit | None = None, split: bool = True) -> Unit:
            split = split and flags["split_passes"]
            passes = passes.split(self.rank.pending > 0, split_stages) if split else passes
            rows = ("gathered", "trained_gathered", "trained_padded")
            whole, trained, shard = (states[f"{kind} {row}"] for row in rows)
            last = states.get(f"{kind} last", 0.0)
            coded = None if compressed is None else compressed.unit(states[f"{kind} compressed"], shard)
            width = self.compute_bytes
            return Unit(whole * width, trained * width, trained, shard, last, passes, experts, coded, split)

        apart = unit("experts") if "experts gathered" in states else None
        parts: list[tuple[Unit, Size]] = []
        waits_more: Size = 0.0
        for kind, modes, count in (("dense", passes.dense, dense), ("routed", passes.routed, blocks - dense)):
            if modes is None:
                continue
            experts = apart if kind == "routed" else None
            chosen = unit(kind, modes[0], experts)
            if not flags["partly"]:
                parts.append((chosen, count))
                continue
            # the first of a stage (memory/recompute.py); with experts, dense blocks are the first
            recomputed = np.minimum(np.maximum(again - (dense if kind == "routed" else 0), 0), count)
            one, others = unit(kind, modes[1], experts), count - recomputed
            parts.append((replace(chosen, split=False), recomputed))
            if flags["split_passes"]:
                here = np.minimum(beside, others)
                parts.append((unit(kind, modes[1], experts, split=False), here))
                beside, others = beside - here, others - here
            parts.append((one, others))
            waits_more = (again - again_waiting) * (one.passes.kept - chosen.passes.kept)
        kinds = [(one, count) for one, count in parts if np.any(count > 0)]
        if np.any(layouts.offload == OFFLOADS.index("activations")):
            kinds = self._offloaded(kinds)
        streams = 1 + (self.job.model.has_source & (dense > 0) & (blocks > dense))
        # blocks that run again read them again, and from the second block on there is a gradient to add to
        tables = streams + ((dense > 1) | (blocks - dense > 1))
        stays = (passes.distances * tables + passes.masks * stages) * (layouts.recompute > 0)
        in_forward = None
        if self.job.model.has_source or self.job.data.separates_documents:
            in_forward = (passes.distances * streams + passes.masks) * (layouts.recompute == 0)
        head_grad = passes.head_grad * self.ends * (self.job.model.lora is None)
        per_microbatch = passes.per_microbatch * np.maximum(stages, streams) + stays
        begin, end = passes.begin.on(self.begins), passes.end.on(self.ends)
        if self.job.model.has_source:  # the norm between them is where the first block of the decoder is
            joins = self.rank.counts.joins
            # a tied head's gradient is one of those of the table
            back = np.maximum(begin.backward - head_grad * self.tied, passes.between_back * joins)
            begin = replace(begin, kept=begin.kept + passes.between * joins, backward=back)
            end = replace(end, later=end.later + passes.end.later * joins)
        end = end.split(self.rank.pending > 0, 1) if flags["split_passes"] else end
        return Stage(
            tuple(kinds), unit("root"), begin, end, head_grad,
            head_grad * self.tied, passes.hidden, passes.hidden * (stages - self.begins),
            per_microbatch, waits_more, in_forward, compressed,
        )  # fmt: skip

    def kept(self) -> Size:
        """Bytes that all blocks keep of a microbatch for its backward pass."""
        shared, chosen = self.shared(), slice(None)
        blocks = self.stage(self._passes(shared, chosen), shared.states_of(chosen)).blocks
        return sum((unit.passes.kept * count for unit, count in blocks), 0.0 * self.rank.in_flight)

    def _offloaded(self, kinds: list[tuple[Unit, Size]]) -> list[tuple[Unit, Size]]:
        """The same with as much of what blocks keep in host memory as it has space for."""
        total = self.rank.in_flight * sum(unit.passes.kept * count for unit, count in kinds)
        offloads = self.layouts.offload == OFFLOADS.index("activations")
        host = host_gib(self.job, self.layouts) * GIB
        stays = np.where(offloads, 1 - np.minimum(1.0, host / np.maximum(total, 1.0)), 1.0)
        return [
            (replace(unit, passes=replace(unit.passes, kept=unit.passes.kept * stays)), count) for unit, count in kinds
        ]
