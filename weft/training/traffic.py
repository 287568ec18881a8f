"""The share and speed of communication, measured every so many steps."""

from __future__ import annotations

from weft.comm.timeline import CommTimeline
from weft.mesh import Mesh


class Traffic:
    """Records the communication of every `every`-th step."""

    def __init__(self, mesh: Mesh, every: int):
        self.mesh, self.every = mesh, every if mesh.everyone is not None else 0
        self.timeline: CommTimeline | None = None

    def turn(self, step: int) -> CommTimeline | None:
        """Call between steps. Returns the timeline of the step before, if it was recorded."""
        over = self.timeline
        due = self.every > 0 and (step + 1) % self.every == 0
        if due or over is not None:
            self.mesh.meter.timeline = self.timeline = CommTimeline(self.mesh.device) if due else None
        return over

    def figures(self, timeline: CommTimeline | None, seconds: float) -> dict[str, float]:
        """The metrics of a recorded step that took `seconds`, on this rank."""
        if timeline is None:
            return {}
        found = timeline.figures(seconds)
        if not any(axis.nodes for axis in self.mesh.every_axis()):
            del found["comm_between_mib"]
        return found
