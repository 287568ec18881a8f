"""Observers: what follows the steps of a rank, such as a tracer. Extensions register kinds of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from weft.job.files.run_folder import RunDir
from weft.job.import_by_name import find_object
from weft.job.registry import Registry
from weft.job.schema import Job

if TYPE_CHECKING:  # a plan reads the registry without torch
    from weft.mesh import Mesh
    from weft.supervisor.heartbeat import Heartbeat
    from weft.training.state import State


class StepObserver(Protocol):
    """Follows the loop of a rank. All ranks call each method with the same steps."""

    recording: bool
    """Whether it records the messages of the current step, with a timeline of its own."""

    def boundary(self, completed: int) -> None:
        """The time of step `completed` ends, and that of the next begins."""

    def phase(self, name: str) -> None:
        """A phase of the loop begins: data, compute, update, eval or checkpoint."""

    def between_steps(self) -> bool:
        """Work between two steps. Returns whether it took time that belongs to no step."""


@dataclass(frozen=True)
class ObserverKind:
    """A kind of observer."""

    name: str
    wanted: Callable[[Job], bool]
    """Whether a job asks for it."""
    build: str
    """`module:function` of (job, run, mesh, announce) that returns the observer. It calls `announce` before work that
    takes seconds, so that this is not mistaken for a hang."""


OBSERVERS: Registry[ObserverKind] = Registry("step observer", __name__)


@dataclass
class StepObservers:
    """The observers of a rank, as one."""

    observers: list[StepObserver] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, run: RunDir, mesh: Mesh, announce: Callable[[], None]) -> StepObservers:
        """Those that a job asks for."""
        kinds = [kind for kind in OBSERVERS if kind.wanted(job)]
        return cls([find_object(kind.build, "watch")(job, run, mesh, announce) for kind in kinds])

    @property
    def recording(self) -> bool:
        """Whether one records the messages of the current step."""
        return any(observer.recording for observer in self.observers)

    def boundary(self, completed: int) -> None:
        for observer in self.observers:
            observer.boundary(completed)

    def phase(self, name: str) -> None:
        for observer in self.observers:
            observer.phase(name)

    def between_steps(self) -> bool:
        """Whether an observer took time that belongs to no step."""
        return any([observer.between_steps() for observer in self.observers])


def phase_reporter(heartbeat: Heartbeat, observers: StepObservers, state: State) -> Callable[[str], None]:
    """A function that reports the phase of the loop that begins, to the supervisor and to the observers."""

    def report(phase: str) -> None:
        heartbeat.now(phase, state.step)
        observers.phase(phase)

    return report
