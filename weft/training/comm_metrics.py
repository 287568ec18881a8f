"""Communication figures of a step for metrics.jsonl: its share of the step, the exposed share, bytes and bandwidth."""

from __future__ import annotations

from weft.comm.timeline import CommTimeline
from weft.mesh import Mesh


class CommMetrics:
    """Records the communication of every `every`-th step."""

    def __init__(self, mesh: Mesh, every: int):
        self.mesh, self.every = mesh, every if mesh.everyone is not None else 0
        self.timeline: CommTimeline | None = None

    def next_step(self, step: int) -> CommTimeline | None:
        """Start recording the step after `step`, if it is due. Returns what was recorded of `step`."""
        recorded = self.timeline
        due = self.every > 0 and (step + 1) % self.every == 0
        if due or recorded is not None:
            self.mesh.meter.timeline = self.timeline = CommTimeline(self.mesh.device) if due else None
        return recorded

    def figures(self, timeline: CommTimeline | None, seconds: float) -> dict[str, float]:
        """The fields of a record, on this rank, for a step that took `seconds`."""
        if timeline is None:
            return {}
        found = timeline.figures(seconds)
        if not any(axis.nodes for axis in self.mesh.every_axis()):
            del found["comm_between_mib"]
        return found
