"""Ranks of several layouts at once, and the sizes that these have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.planner.memory.stage_blocks import BlockCounts
from weft.planner.model.model_facts import Size
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES, SCHEDULES
from weft.planner.search.candidates import Layouts, distinct

SPLITS = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE_NAMES])
"""By the code of a schedule: whether it computes gradients of weights separately."""
ALL_FORWARD_FIRST = np.array([name == "gpipe" for name in SCHEDULE_NAMES])
"""The same: whether all microbatches pass forward, and their losses wait, before the first backward pass."""


@dataclass(frozen=True)
class Rank:
    """One rank of each of some layouts."""

    layouts: Layouts
    at: Size
    """Its place in the pipeline."""
    counts: BlockCounts
    position: Size
    """Its column in the table of unit sizes."""
    in_flight: Size
    """Microbatches held at once, each over all stages of the rank."""
    pending: Size
    """Of these, held until gradients of weights are made."""
    losses_wait: Size
    """Backward passes of the first stage during which the loss of another microbatch waits."""
    splits: Size
    """Whether gradients of weights are computed separately."""
    reduces_last: Size
    """Whether gradients are reduced after the last pass, because the schedule computes some of them separately."""

    @property
    def steady(self) -> Size:
        """Where forward passes go on after the first backward pass of the rank's first stage: there are more
        microbatches than that stage holds."""
        pp, stages = self.layouts.pp, self.layouts.virtual_stages
        held = self.in_flight * stages
        later = np.where(self.layouts.back_and_forth, self.at + 1, np.minimum(held - pp, (stages - 1) * pp))
        return (pp > 1) & (self.layouts.accumulation > held - np.where(stages > 1, later, 0)) & ~self.alone

    @property
    def alone(self) -> Size:
        """Where no other microbatch is held in backward passes with all gradients: on the last of two ranks of zbv."""
        last = (self.layouts.pp == 2) & (self.at == 1) & (self.layouts.schedule == SCHEDULE_NAMES.index("zbv"))
        return last & (self.layouts.accumulation > self.in_flight)

    @property
    def neighbours(self) -> Size:
        """Ranks that it exchanges messages with."""
        pp = self.layouts.pp
        inner = (self.at > 0) & (self.at < pp - 1)
        around = (self.layouts.virtual_stages > 1) & ~self.layouts.back_and_forth & (pp > 2)
        return 1.0 + (inner | around)

    def take(self, chosen: Any) -> Rank:
        """The same for some of the layouts."""
        return Rank(
            self.layouts.take(chosen), self.at[chosen], BlockCounts(*(c[chosen] for c in self.counts)),
            self.position[chosen], self.in_flight[chosen], self.pending[chosen], self.losses_wait[chosen],
            self.splits[chosen], self.reduces_last[chosen],
        )  # fmt: skip


def microbatches_by_schedule(layouts: Layouts, index: Size, *kinds: str) -> list[Size]:
    """Microbatches, each over all blocks of pipeline rank `index`, by kind: held at once (`in_flight`), of these with
    gradients of weights still to be computed (`pending`), or held before their backward pass (`awaiting_backward`);
    backward passes of the first stage during which a loss waits (`losses_wait`), and where some are split
    (`splits_on`)."""
    first, position = distinct(layouts.schedule, layouts.pp, layouts.virtual_stages, layouts.accumulation, index)
    layouts, index = layouts.take(first), index[first]
    out = [np.full(len(first), 1.0 if kind in ("in_flight", "awaiting_backward") else 0.0) for kind in kinds]
    for code, name in enumerate(SCHEDULE_NAMES):
        some = np.flatnonzero((layouts.schedule == code) & (layouts.pp > 1))
        if len(some):
            count, entry = layouts.accumulation[some], SCHEDULES[name]
            given = layouts.pp[some], layouts.virtual_stages[some], index[some], count
            for held, kind in zip(out, kinds, strict=True):
                held[some] = np.minimum((getattr(entry, kind) or entry.in_flight)(*given), count)
    return [held.take(position) for held in out]


@dataclass(frozen=True)
class SharedTables:
    """States and passes that many layouts of a group have in common."""

    names: tuple[str, ...]
    states: Any
    """[names, ways]"""
    ways: Size
    """For each layout its column in `states`."""
    passes: Any
    columns: Size
    """For each layout its column in `passes`."""

    def states_of(self, chosen: slice) -> dict[str, Size]:
        """The states of some of the layouts."""
        return dict(zip(self.names, self.states.take(self.ways[chosen], axis=1), strict=True))
