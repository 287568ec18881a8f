"""What the ranks of a group say: everyone's answer, or the first one's, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

T = TypeVar("T")


class Everyone:
    """The ranks of a group; without one, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, ask: Callable[[], T], failed: Callable[[str], Exception]) -> T:
        """What rank 0 answers, on every rank; an error of its reaches them all, as `failed` puts it."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = ask()
            except Exception as error:
                answer[1] = in_words(error)
        if self.group is not None:
            dist.broadcast_object_list(answer, src=dist.get_global_rank(self.group, 0), group=self.group)
        if answer[1] is not None:
            raise failed(answer[1])
        return answer[0]


def in_words(error: BaseException) -> str:
    """One line a person can read, also for DCP's exception, which carries one error a rank with its traceback."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    lines = [f"rank {rank}: {in_words(cause[0])}" for rank, cause in sorted(error.failures.items())]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more ranks" if len(lines) > 3 else "")
