"""What a pipeline schedule registers: its name, action-list builder, limits, and the facts the planner needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from weft.planner.schedules.actions import Action

ActionLists = tuple[tuple[int, ...], list[list[Action]]]
"""The rank of each stage, and one list of actions a rank."""

Size = Any
"""A number or an array of numbers, one a layout."""


class Shares(NamedTuple):
    """What a stage's time for one microbatch consists of; the sum is 1."""

    forward: Size
    inputs: Size
    """Gradients of inputs, and those of weights where they are computed in the same pass."""
    weights: Size
    """Gradients of weights that are computed separately."""


def missing(ranks: Size, microbatches: Size) -> Size:
    """Share of microbatches that a pipeline lacks to have one for each rank."""
    return np.maximum(0.0, 1 - microbatches / ranks)


@dataclass(frozen=True)
class ScheduleEntry:
    """One pipeline schedule. The job checks, planner, executor, docs and command line read this entry."""

    name: str
    """The value of parallel.schedule."""
    description: str
    """One line for docs and help."""
    build: Callable[[int, int, int], ActionLists]
    """Makes the action lists for (ranks, microbatches, stages per rank)."""
    bubble: Callable[[Shares, Size, Size], Size]
    """Idle time of a rank for (shares of a stage's time, ranks, microbatches), as a multiple of the time that the other
    stages need for one microbatch; as `simulate` gives it for equal stages."""
    in_flight: Callable[[Size, Size, Size, Size], Size]
    """Microbatches whose activations a rank holds at once, each over all of its blocks, for (ranks, stages per rank,
    rank, microbatches)."""
    pending: Callable[[Size, Size, Size, Size], Size] = lambda ranks, stages, rank, microbatches: 0.0
    """Of these, microbatches whose weight gradients are still to be computed, for the same arguments."""
    awaiting_backward: Callable[[Size, Size, Size, Size], Size] | None = None
    """Of these, microbatches that have not begun their backward pass; None: all of them."""
    losses_wait: Callable[[Size, Size, Size, Size], Size] = lambda ranks, stages, rank, microbatches: 0.0
    """Backward passes of the first stage during which the rank holds the loss of another microbatch."""
    default_stages: int = 1
    """Stages per rank when parallel.virtual_stages is left out."""
    allowed_stages: tuple[int, ...] | None = None
    """Stages per rank that the schedule supports; None: any number."""
    searched_stages: tuple[int, ...] = ()
    """Stages per rank that the search tries; empty: it is used only when the job names it."""
    splits_backward: bool = False
    """Computes the gradient of a stage's input first and that of its weights later."""
    splits_on: Callable[[Size, Size, Size, Size], Size] = lambda ranks, stages, rank, microbatches: 1.0
    """1 on the ranks that compute some gradients of weights later, for the same arguments; there all gradients are
    reduced after the last pass."""
    last_stage_on_first_rank: bool = False
    """Stages go down the ranks and back up in a V, so the first rank holds the head as well as the embedding."""
    stands_for: dict[int, str] = field(default_factory=dict, hash=False)
    """For a name that covers several schedules: the one used with each number of stages per rank."""
