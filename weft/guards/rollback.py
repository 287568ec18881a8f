"""The wish to go back some steps, raised on all ranks alike and heard by the loop of attempts in training/rank.py."""

from __future__ import annotations


class RollBack(Exception):
    """Go back to `to_step` or the newest step before it that is still known, and pass over the batches of `skip`."""

    def __init__(self, to_step: int, skip: tuple[int, ...], why: str, fault: str = "spike"):
        super().__init__(why)
        self.to_step, self.skip, self.why, self.fault = max(0, to_step), skip, why, fault
