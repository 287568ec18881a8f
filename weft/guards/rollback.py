"""The request to roll back, raised on all ranks and handled in training/rank.py."""

from __future__ import annotations


class RollBack(Exception):
    """Return to `to_step` or the newest known step before it, and skip the batches of `skip`."""

    def __init__(self, to_step: int, skip: tuple[int, ...], why: str, fault: str = "spike"):
        super().__init__(why)
        self.to_step, self.skip, self.why, self.fault = max(0, to_step), skip, why, fault
