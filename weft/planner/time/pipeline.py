"""Time of a pipelined step in closed form, and how layers are divided over stages."""

from __future__ import annotations

import numpy as np

from weft.planner.model.model_facts import Size
from weft.planner.schedules.entry import Shares
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES, SCHEDULES
from weft.planner.search.candidates import Layouts


def stage_layers(layers: Size, stages: Size) -> tuple[Size, Size]:
    """Blocks of the largest stage, and of the last. Embedding and head count as a block where that evens out."""
    layers, stages = np.asarray(layers, float), np.asarray(stages, float)
    even = np.mod(layers, stages) == 0
    ends = (np.mod(layers + 2, stages) == 0) & ~even
    one = (np.mod(layers + 1, stages) == 0) & ~even & ~ends
    most = np.where(even, layers / stages, np.ceil((layers + 2 * ends + one) / stages))
    last = np.where(even, most, np.where(ends | one, most - 1, np.floor(layers / stages)))
    return most, np.where(stages > 1, last, layers)


def step_time(
    layouts: Layouts, layers: Size, largest_and_last: tuple[Size, Size], forward: Size, backward: Size, weights: Size,
    head: Size, embedding: Size,
) -> tuple[Size, Size]:  # fmt: skip
    """Seconds from the first forward to the last backward without messages, and the bubble of the busiest rank.

    `largest_and_last` are the blocks of those stages, `forward` and `backward` one block's for one microbatch,
    `weights` the part of backward for gradients of weights, `head` and `embedding` both passes. A rank's own work, then
    its idle time while the pipeline fills and drains: (pp − 1) of a stage's forward and backward for 1F1B, 1/v of that
    when interleaved (Narayanan et al. 2021), less the weights' gradients under zero-bubble schedules (Qi et al. 2023).
    """
    pp, v, count = layouts.pp, layouts.virtual_stages, layouts.accumulation
    most, last = largest_and_last
    block = forward + backward
    busiest = np.maximum(most * v * block + embedding, ((v - 1) * most + last) * block + head)
    alone = layers * block + head + embedding
    busiest = np.where(pp > 1, busiest, alone)
    once = (alone - busiest) / v  # the other stages' passes of one microbatch, while this one is idle
    # a stage with recomputed blocks computes all gradients in one pass
    recomputes = (layouts.recompute > 0) & (layouts.recompute_blocks != 0)
    back = backward / np.maximum(block, 1e-30)
    later = np.where(recomputes, 0.0, weights / np.maximum(block, 1e-30))
    shares = Shares(1 - back, back - later, later)
    idle = np.zeros(len(layouts))
    for code in np.unique(layouts.schedule):
        found = SCHEDULES[SCHEDULE_NAMES[code]].bubble(shares, pp, count)
        idle = np.where(layouts.schedule == code, found, idle)
    bubble = np.where(pp > 1, np.maximum(once, 0) * idle, 0.0)
    return count * busiest + bubble, bubble
