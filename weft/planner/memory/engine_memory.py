"""Memory of a rank of Weft's engine by component, for many layouts at once.

States are exact; the rest is the peak of a trace through one step (step_trace.py). `weft dryrun` traces the real engine
and is the independent check.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from weft.job.schema import Job
from weft.planner.memory.layout_group import LayoutGroup
from weft.planner.memory.layout_ranks import SPLITS, Rank, microbatches_by_schedule
from weft.planner.memory.long_sequences import chunk_tokens
from weft.planner.memory.peak_walk import PARTS
from weft.planner.memory.stage_blocks import BlockCounts, StageBlocks
from weft.planner.memory.states import UnitSizes, unit_sizes
from weft.planner.memory.unit_passes import PassTables
from weft.planner.model.model_facts import Size
from weft.planner.model.parameters import coords_of
from weft.planner.plan import Plan
from weft.planner.search.candidates import OFFLOADS, Layouts, distinct, hashed

TRACED_AT_ONCE = 8192
"""Layouts traced at once: their arrays stay in the cache."""
Flags = dict[str, Any]
"""What is the same for all layouts of a group."""


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
        self._known_peaks: tuple[Any, Any] = np.array([], np.uint64), np.array([])
        """Sorted keys of layouts, and the memory of each."""

    def compiled(self, layouts: Layouts) -> Size:
        """Which layouts compile their blocks: by default on GPUs where no collective is inside a block."""
        if self.compile != "auto" or self.job.model.takes_vectors or self.plan.device != "cuda":
            return np.full(len(layouts), self.compile is True and self.plan.device == "cuda")
        return (layouts.tp == 1) & (layouts.cp == 1)

    def peak(self, layouts: Layouts) -> Size:
        """Bytes of the fullest rank. Layouts that were asked for before are looked up."""
        key, first, position = _unique(hashed(*_memory_columns(layouts)))
        keys, peaks = self._known_peaks
        known = np.isin(key, keys)
        if not known.all():
            new = first[~known]
            keys = np.concatenate([keys, key[~known]])
            peaks = np.concatenate([peaks, self._fullest(layouts.take(new), detail=False)["total"]])
            order = np.argsort(keys)
            self._known_peaks = keys, peaks = keys[order], peaks[order]
        return peaks[np.searchsorted(keys, key)][position]

    def parts(self, layouts: Layouts) -> dict[str, Size]:
        """Bytes by component of the fullest rank, when it holds most."""
        found = self._fullest(layouts, detail=True)
        return {part: found[part] for part in PARTS}

    def group(self, layouts: Layouts, place: Place) -> LayoutGroup:
        """One rank of one layout: what it keeps, and what its step is made of."""
        rank, units = self._ranks(layouts, place)
        ((_, flags, ((_, regime),)),) = self._groups(rank)[1]
        return LayoutGroup(self.tables, rank, flags | regime, units)

    def least(self, layouts: Layouts) -> Size:
        """Bytes that the fullest rank has at least, however the model is split into stages."""
        return self._trace(layouts, Place(np.zeros(len(layouts), np.int64)), detail=False, least=True)["total"]

    def rank(self, layouts: Layouts, place: Place) -> dict[str, Size]:
        """Bytes by component of one rank, when it holds most."""
        found = self._trace(layouts, place, detail=True)
        return {part: found[part] for part in PARTS}

    def _fullest(self, layouts: Layouts, detail: bool) -> dict[str, Size]:
        if self.plan.sync not in ("step", "predict"):  # between exchanges every replica is by itself
            layouts = replace(layouts, dp_replicate=np.ones(len(layouts), np.int64))
        size = len(layouts)
        piped = np.flatnonzero(layouts.pp > 1)
        pipelines = layouts.take(piped)
        inner = self.stages.inner(pipelines, self.plan.backend == "gloo")
        some = [np.arange(size), piped, *(piped[number > 0] for number in inner)]
        at = [np.zeros(size, np.int64), pipelines.pp - 1, *(number[number > 0] for number in inner)]
        found = self._trace(layouts.take(np.concatenate(some)), Place(np.concatenate(at)), detail)
        best, offset = np.arange(size), size
        for which in some[1:]:
            other = offset + np.arange(len(which))
            heavier = found["total"][other] > found["total"][best[which]]
            best[which], offset = np.where(heavier, other, best[which]), offset + len(which)
        return {part: held[best] for part, held in found.items()}

    def _ranks(self, layouts: Layouts, place: Place, least: bool = False) -> tuple[Rank, dict[str, UnitSizes]]:
        """The ranks at a place, and the sizes of their units; with `least`, with as few blocks as a stage can have."""
        at = np.broadcast_to(place.pp, len(layouts))
        if least:
            blocks = np.maximum((self.job.model.layers or 0) // layouts.pp, 1).astype(float)
            inner = blocks if self.job.model.first_blocks is None else 0.0 * blocks
            dense = np.where(layouts.pp > 1, inner, self.stages.first_dense)
            again = np.minimum(blocks, layouts.recompute_blocks / layouts.pp)
            counts = BlockCounts(blocks, dense, again, again, blocks * (again > 0), 0.0 * blocks)
        else:
            counts = self.stages.at(layouts, at)
        rounds = self.device == "cpu" and self.plan.precision == "bf16" and not self.plan.split_master
        first, position = distinct(layouts.tp, layouts.ep, layouts.cp, layouts.dp_shard, layouts.sequence)
        units = unit_sizes(self.job, layouts.take(first), place.tp, place.shard, rounds)
        kinds = "in_flight", "pending", "losses_wait", "splits_on"
        in_flight, pending, losses, splits_on = microbatches_by_schedule(layouts, at, *kinds)
        splits = SPLITS[layouts.schedule] & (layouts.pp > 1)
        reduces_last = splits & (splits_on > 0) & (layouts.dp_shard > 1)
        every = (counts.blocks > 0) & (layouts.recompute > 0)
        share = counts.at_once / np.maximum(counts.blocks, 1)
        at_once = splits * np.where(layouts.recompute_blocks < 0, every, share)
        if len(some := np.flatnonzero(at_once)):
            (awaiting,) = microbatches_by_schedule(layouts.take(some), at[some], "awaiting_backward")
            in_flight[some] += at_once[some] * (awaiting - in_flight[some])
            pending, splits = pending * (1 - at_once), splits & (at_once < 1)
        if least:  # the first rank of a pipeline in a V holds least
            fewest = np.minimum(in_flight - 0.5, (layouts.accumulation + 1) / 2)
            in_flight = np.where(layouts.pp > 1, fewest, in_flight)
        return Rank(layouts, at, counts, position, in_flight, pending, losses, splits, reduces_last), units

    def _trace(self, layouts: Layouts, place: Place, detail: bool, least: bool = False) -> dict[str, Size]:
        out = {name: np.zeros(len(layouts)) for name in (("total", *PARTS) if detail else ("total",))}
        ranks, units = self._ranks(layouts, place, least)
        order, groups = self._groups(ranks)
        ranks = ranks.take(order)

        for group, flags, chunks in groups:
            own = LayoutGroup(self.tables, ranks.take(group), flags, units, least)
            shared = own.shared()
            for chunk, regime in chunks:
                inside = slice(chunk.start - group.start, chunk.stop - group.start)
                walk = own.take(inside, flags | regime).trace(detail, shared, inside)
                out["total"][order[chunk]] = walk.peak
                for part, held in walk.at_peak.items():
                    out[part][order[chunk]] = held

        return out

    def _groups(self, ranks: Rank) -> tuple[Any, list[tuple[slice, Flags, list[tuple[slice, Flags]]]]]:
        """An order of the layouts; the slices of it whose flags of sizes are the same; and the chunks of each slice
        that are traced together, with their flags of the step."""
        layouts = ranks.layouts
        fp32 = layouts.precision == 0
        sharded = layouts.dp_shard > 1
        piped = layouts.pp > 1
        several = layouts.accumulation > 1
        partly = layouts.recompute_blocks >= 0
        alone = ~fp32 & (layouts.dp * layouts.cp * layouts.pp * layouts.accumulation == 1)
        again = several & fp32
        replicas = layouts.dp_replicate * layouts.cp > 1
        single = fp32 & (layouts.dp_replicate == 1)
        retain = np.where(sharded, ~(again & (layouts.zero == 1)), ~again & single)
        sizes: Flags = {
            "fp32": fp32, "tp": layouts.tp > 1, "sequence": layouts.sequence, "sharded": sharded,
            "ep": layouts.ep > 1, "alone": alone, "buckets": ~sharded & (replicas | ~fp32) & ~alone, "retain": retain,
            "compiled": self.compiled(layouts),
            "long": (chunk_tokens(self.job, layouts) > 0) | (layouts.offload == OFFLOADS.index("activations")),
        }  # fmt: skip
        step: Flags = {
            "piped": piped, "zero": np.where(ranks.reduces_last, 1, _step_stage(layouts)),
            "split_passes": ranks.splits, "reduces_last": ranks.reduces_last, "partly": partly,
            "several": several, "steady": ranks.steady & several,
        }  # fmt: skip
        outer, key = (_digits(len(layouts), columns) for columns in (sizes, step))
        _, rank = distinct(outer, key)  # numbered in ascending order
        order = np.argsort(rank.astype(np.uint16) if rank.max(initial=0) < 1 << 16 else rank, kind="stable")
        outer, key = outer[order], key[order]

        def flags(columns: Flags, at: int) -> Flags:
            return {name: column[order[at]].item() for name, column in columns.items()}

        groups = []
        for start, stop in pairwise(_edges(outer)):
            chunks = [
                (slice(i, min(i + TRACED_AT_ONCE, start + b)), flags(step, i))
                for a, b in pairwise(_edges(key[start:stop]))
                for i in range(start + a, start + b, TRACED_AT_ONCE)
            ]
            groups.append((slice(start, stop), flags(sizes, start), chunks))
        return order, groups


def _unique(key: Any) -> tuple[Any, Any, Any]:
    """The different keys in ascending order, an index of each, and the position of every key; much faster than
    np.unique, whose indices are the first."""
    order = np.argsort(key)
    ordered = key[order]
    new = np.ones(len(key), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    position = np.empty(len(key), np.int64)
    position[order] = np.cumsum(new) - 1
    return ordered[new], order[new], position


def _step_stage(layouts: Layouts) -> Size:
    """The ZeRO stage whose step is the same: one microbatch reduces each gradient once, and all ranks of a pipeline in
    a V that splits its backward pass reduce whole gradients."""
    stage = np.where((layouts.accumulation == 1) & (layouts.zero == 1), 2, layouts.zero)
    whole = SPLITS[layouts.schedule] & layouts.back_and_forth & (layouts.pp > 1)
    return np.where(whole, 1, stage) * (layouts.dp_shard > 1)


def _digits(size: int, columns: Flags) -> Any:
    """A number for each combination of flags, each from 0 to 3."""
    key = np.zeros(size, np.int64)
    for column in columns.values():
        key = key * 4 + column
    return key


def _edges(values: Any) -> list[int]:
    """Where a sorted array changes, with both ends."""
    return [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]


def _memory_columns(layouts: Layouts) -> tuple[Any, ...]:
    """Equal for layouts whose memory is the same: styles of cp do not matter."""
    stage = np.where(layouts.precision == 0, layouts.zero, _step_stage(layouts))  # fp32 blocks keep more under ZeRO 1
    return (
        layouts.dp_replicate > 1, layouts.dp_shard, stage, layouts.tp, layouts.sequence, layouts.cp, layouts.pp,
        layouts.virtual_stages, layouts.schedule, layouts.ep, layouts.microbatch, layouts.accumulation,
        layouts.recompute, layouts.recompute_blocks, layouts.offload, layouts.precision, layouts.compression,
    )  # fmt: skip
