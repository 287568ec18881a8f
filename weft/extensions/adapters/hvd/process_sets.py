"""Process sets: some of the ranks, to which a collective can be limited."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.extensions.adapters.hvd.engine import CollectiveEngine, Handle, HorovodInternalError

_engine: list[CollectiveEngine] = []
"""The engine between init() and shutdown()."""
_sets: list[ProcessSet] = []
"""The sets that were added."""


class ProcessSet:
    """Some ranks, in order. Give it to hvd.init(process_sets=…) or hvd.add_process_set(…), then to collectives."""

    def __init__(self, ranks: Iterable[int]):
        chosen = list(ranks) if isinstance(ranks, Iterable) else [None]
        if any(not isinstance(rank, int) for rank in chosen):
            raise ValueError(f"hvd.ProcessSet takes a list of ranks, such as [0, 1], not {ranks!r}")
        self.ranks: list[int] | None = sorted(chosen)
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """The number of ranks; None before the set is added."""
        return None if self.process_set_id is None else len(self._ranks())

    def rank(self) -> int | None:
        """This rank's position among those of the set; None before the set is added."""
        return (
            self._ranks().index(_engine[0].mesh.rank) if self.process_set_id is not None and self.included() else None
        )

    def included(self) -> bool | None:
        """Whether this rank belongs to the set."""
        return _engine[0].mesh.rank in self._ranks() if self.ranks is not None and _engine else None

    def _ranks(self) -> list[int]:
        assert self.ranks is not None
        return self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0


def use_engine(engine: CollectiveEngine | None) -> None:
    """Remember the engine of init(), or forget it."""
    _engine[:] = [] if engine is None else [engine]
    global_process_set.ranks = [] if engine is None else list(range(engine.mesh.world))


def forget_process_sets() -> None:
    """After shutdown() no set but the global one is valid."""
    for process_set in _sets:
        process_set.process_set_id = None
    _sets.clear()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a set, on all ranks with the same ranks. A set of the same ranks must not exist."""
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not _engine:
        raise ValueError("hvd.init() was not called")
    ranks, world = chosen.ranks or [], _engine[0].mesh.world
    invalid = None
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < world:
        invalid = f"a process set has different ranks from 0 to {world - 1}, not {ranks}"
    if any(other.ranks == ranks for other in (global_process_set, *_sets)):
        invalid = f"a process set of the ranks {ranks} exists already"
    handle = _engine[0].start("add_set", None, ranks=ranks, invalid=invalid, finish=lambda _, answer: answer["id"])
    chosen.process_set_id = handle.wait()
    _sets.append(chosen)
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set, on all ranks. Returns whether it existed; the global set is never removed."""
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    handle: Handle = _engine[0].start("remove_set", None, id=number, finish=lambda _, answer: answer["id"])
    process_set.process_set_id = None
    _sets[:] = [other for other in _sets if other is not process_set]
    return handle.wait() is not None


def start_in(process_set: ProcessSet, do: str, name: str | None, tensors: Any = (), **details: Any) -> Handle:
    """Ask for a collective of a set to which this rank belongs."""
    if not _engine:
        raise ValueError("hvd.init() was not called")
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} was not added; call hvd.add_process_set(…) on all ranks")
    if not process_set.included():
        raise HorovodInternalError(f"rank {_engine[0].mesh.rank} does not belong to {process_set}")
    return _engine[0].start(do, name, tensors, process_set.process_set_id, **details)
