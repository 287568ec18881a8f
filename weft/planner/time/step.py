"""The estimate of many layouts at once: step time with its parts, memory with its parts, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from weft.hardware.probe import GIB
from weft.planner.calibration import Calibration
from weft.planner.memory.framework_memory import framework_memory
from weft.planner.memory.live_bytes import CODED_BYTES
from weft.planner.model.cluster_facts import ClusterFacts
from weft.planner.model.model_facts import ModelFacts, Size
from weft.planner.search.candidates import OFFLOADS, RECOMPUTES, Layouts, distinct
from weft.planner.time.block import BlockTime, block_time, exposed
from weft.planner.time.pipeline import step_time
from weft.planner.time.weight_exchange import WeightExchange, weight_exchange

Terms = TypeVar("Terms", BlockTime, WeightExchange)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, and the terms that its parts are computed from."""

    total: Size
    block: BlockTime
    dp: Size
    optimizer: Size
    offload: Size
    bubble: Size
    messages: Size
    waiting: Size
    blocks: Size
    """Blocks of the largest stage times microbatches."""
    backward: Size
    """Backward of one block with what is recomputed."""
    again: Size
    """Share of a block that full recompute repeats."""
    gpu_again: Size


@dataclass(frozen=True)
class Estimates:
    """One entry a layout in every array."""

    model: ModelFacts
    cluster: ClusterFacts
    calibration: Calibration
    layouts: Layouts
    memory: dict[str, Size]
    """GiB by component of the fullest rank, or their total."""
    terms: StepTimes
    factor: Size = 1.0
    """Ratio of the step time to that of the model."""
    copies: Size = 0.0
    """Seconds in which the device waits for states that live elsewhere."""

    @cached_property
    def step_time_s(self) -> Size:
        return self.terms.total * self.factor + self.copies

    @property
    def low_s(self) -> Size:
        return self.step_time_s * (1 - self.calibration.spread)

    @property
    def high_s(self) -> Size:
        return self.step_time_s * (1 + self.calibration.spread)

    @cached_property
    def peak_gib(self) -> Size:
        return sum(self.memory.values())

    @property
    def fits(self) -> Size:
        return self.peak_gib <= self.cluster.memory_gib * self.calibration.usable

    @cached_property
    def time(self) -> dict[str, Size]:
        """Exposed seconds of a step by part; they add up to step_time_s. A block's communication counts only as far as
        it makes the block longer."""
        t, b = self.terms, self.terms.block
        passes = 2 + t.again
        host = t.blocks * (b.forward + t.backward - b.gpu_forward - b.gpu_backward - t.gpu_again)
        step = self.calibration.step_ms * 1e-3
        parts = {
            "tp": t.blocks * passes * b.tp * np.minimum(1, b.forward / np.maximum(b.gpu_forward, 1e-30)),
            "cp": t.blocks * (b.cp_forward * (1 + t.again) + b.cp_backward), "ep": t.blocks * passes * b.ep,
            "pp_bubble": t.bubble, "pp_send": t.messages, "dp": t.dp, "optimizer": t.optimizer, "offload": t.offload,
            "data": 0.0 * t.total, "host": step + np.maximum(0, host), "waiting": t.waiting,
        }  # fmt: skip
        parts = {"compute": t.total - sum(parts.values()), **parts}
        times = {part: seconds * self.factor for part, seconds in parts.items()}
        return {**times, "offload": times["offload"] + self.copies}

    @property
    def computed(self) -> Size:
        """FLOPs that are computed, over those of the model: more where blocks are recomputed."""
        return 1 + self.terms.again / self.model.passes

    def scaled(self, factor: Size) -> Estimates:
        """The same with step times multiplied by a factor."""
        return replace(self, factor=self.factor * factor)


def estimate(
    model: ModelFacts, cluster: ClusterFacts, layouts: Layouts, cal: Calibration,
    memory: dict[str, Size] | None = None,
) -> Estimates:  # fmt: skip
    """Time and memory of every layout. `memory` is bytes by part; by default the calibrated framework's."""
    held = framework_memory(model, layouts, cal) if memory is None else memory
    terms = _step_times(model, cluster, layouts, cal)
    return Estimates(model, cluster, cal, layouts, {k: b / GIB for k, b in held.items()}, terms)


def _once(
    kind: type[Terms], compute: Callable[..., Terms], model: ModelFacts, cluster: ClusterFacts, layouts: Layouts,
    cal: Calibration,
) -> Terms:  # fmt: skip
    """Terms of layouts, computed once for all that agree in the settings which the terms depend on."""
    if np.ndim(model.layers) or np.ndim(cluster.memory_gib):  # a model or cluster for each layout
        return compute(model, cluster, layouts, cal)
    first, position = distinct(*kind.columns(layouts))
    found = compute(model, cluster, layouts.take(first), cal)
    arrays = {f.name: np.broadcast_to(getattr(found, f.name), len(first)).take(position) for f in fields(kind)}
    return kind(**arrays)


def _step_times(model: ModelFacts, cluster: ClusterFacts, layouts: Layouts, cal: Calibration) -> StepTimes:
    block = _once(BlockTime, block_time, model, cluster, layouts, cal)
    exchange = _once(WeightExchange, weight_exchange, model, cluster, layouts, cal)
    count, z, pp, v = layouts.accumulation, layouts.zero, layouts.pp, layouts.virtual_stages
    here = np.where(pp > 1, exchange.largest * v, model.layers)
    full = layouts.recompute == RECOMPUTES.index("full")
    some = layouts.recompute == RECOMPUTES.index("selective")
    again = np.where(layouts.recompute_blocks >= 0, np.ceil(layouts.recompute_blocks / pp), here)
    share = np.minimum(again / np.maximum(here, 1), 1)
    coding = block.coding * (1 - full * share)
    block = replace(
        block, forward=block.forward + coding, gpu_forward=block.gpu_forward + coding,
        backward=block.backward + coding, gpu_backward=block.gpu_backward + coding,
    )  # fmt: skip
    backward = block.backward + np.where(full, block.forward, np.where(some, block.again, 0.0)) * share
    gpu_again = np.where(full, block.gpu_forward, np.where(some, block.gpu_again, 0.0)) * share

    sent = exchange.message + block.row_bytes / np.where(layouts.sequence, layouts.tp, 1) / (exchange.stage_gb_s * 1e9)
    messages = np.where(pp > 1, 2 * sent * (1 - cal.overlap_pp) * (count * v + pp - 1), 0.0)
    passed, bubble = step_time(
        layouts,
        model.layers,
        (exchange.largest, exchange.last),
        block.forward,
        backward,
        block.weights,
        block.head + np.where(full, block.head_again, 0.0),
        block.embedding,
    )
    window = here * (block.forward + backward)
    often = 2 * exchange.gathers * (z == 3) + exchange.scatter
    rarely = np.where(z == 2, exchange.gathers, 0.0) + exchange.between
    cut = count * exposed(often, window, cal.overlap_dp) + exposed(rarely, window, cal.overlap_dp)
    dp = np.where(
        z >= 2, cut + exchange.encoding * count, exposed(exchange.once, window, cal.overlap_dp) + exchange.encoding
    )
    dp = np.where(layouts.dp * layouts.cp > 1, dp, 0.0)
    offloaded = layouts.offload == OFFLOADS.index("activations")
    stored = np.where(np.asarray(model.coded) > 0, CODED_BYTES / np.where(layouts.precision == 0, 4.0, 2.0), 1.0)
    offload = np.where(offloaded, 2 * block.row_bytes * stored * here * count / (cluster.host_gb_s * 1e9), 0.0)
    nodes = np.maximum(1, layouts.world / cluster.node_size)
    update = exchange.optimizer + np.where(count > 1, count * exchange.sums, 0.0)
    busy = passed + messages + dp + update + offload + cal.step_ms * 1e-3
    waiting = busy * cal.jitter * np.log2(nodes)
    return StepTimes(
        busy + waiting, block, dp, update, offload, bubble, messages, waiting, count * here, backward,
        np.where(full, share, 0.0), gpu_again,
    )  # fmt: skip
