"""Some steps are watched more closely: how much of them was communication, what of it nothing hid, and how fast."""

from __future__ import annotations

from weft.comm.timeline import Spans
from weft.mesh import Mesh


class Traffic:
    """Lends the axes of a mesh a notebook for every so many steps; in the others they note nothing."""

    def __init__(self, mesh: Mesh, every: int):
        self.mesh, self.every = mesh, every if mesh.everyone is not None else 0
        self.spans: Spans | None = None

    def turn(self, step: int) -> Spans | None:
        """A step is over, and the next begins. Returns the notes of the former, if there are any."""
        over = self.spans
        due = self.every > 0 and (step + 1) % self.every == 0
        if due or over is not None:
            self.spans = Spans(self.mesh.device) if due else None
            for axis in self.mesh.every_axis():
                axis.spans = self.spans
        return over

    def figures(self, spans: Spans | None, seconds: float) -> dict[str, float]:
        """For metrics.jsonl, of a step of so many seconds, as this rank saw it."""
        if spans is None:
            return {}
        found = spans.figures(seconds)
        if not any(axis.nodes for axis in self.mesh.every_axis()):
            del found["comm_between_mib"]
        return found
