"""Communication figures of a step for metrics.jsonl: its share of the step, the exposed share, bytes and bandwidth."""

from __future__ import annotations

from typing import Any

from weft.comm.timeline import CommTimeline
from weft.mesh import Mesh
from weft.training.step_observers import StepObservers


class CommMetrics:
    """Records the communication of every `every`-th step."""

    def __init__(self, mesh: Mesh, every: int, observers: StepObservers | None = None):
        self.mesh, self.every, self.observers = mesh, every if mesh.everyone is not None else 0, observers
        self.timeline: CommTimeline | None = None

    def next_step(self, step: int) -> CommTimeline | None:
        """Start recording the step after `step`, if it is due. Returns what was recorded of `step`."""
        recorded, self.timeline = self.timeline, None
        if self.observers is not None:
            self.observers.boundary(step)
            if self.observers.recording:  # its own timeline records the messages
                return recorded
        due = self.every > 0 and (step + 1) % self.every == 0
        if due or recorded is not None:
            self.mesh.meter.timeline = self.timeline = CommTimeline(self.mesh.device) if due else None
        return recorded

    def figures(self, timeline: CommTimeline | None, seconds: float) -> dict[str, Any]:
        """The fields of a record, on this rank, for a step that took `seconds`."""
        if timeline is None:
            return {}
        found: dict[str, Any] = timeline.figures(seconds)
        sizes = {axis.name: axis.size for axis in self.mesh.every_axis()}
        found["comm_axes"] = {
            axis: {"ranks": sizes[axis], **figures} for axis, figures in timeline.axes().items() if axis in sizes
        }
        if not any(axis.nodes for axis in self.mesh.every_axis()):
            del found["comm_between_mib"]
        return found
