"""The global batch of each step: `train.global_batch`, or a smaller one at the start (`train.batch_ramp`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchRamp:
    """Sequences of each step. Steps count from 0, as in a loader."""

    global_batch: int
    stages: tuple[tuple[int, int], ...] = ()
    """(number of the last step, sequences): steps up to this number have so many sequences."""

    def batch(self, step: int) -> int:
        """Sequences of a step."""
        return next((size for end, size in self.stages if step < end), self.global_batch)

    def samples_before(self, step: int) -> int:
        """Sequences of all steps before a step."""
        total = begin = 0
        for end, size in self.stages:
            total += (min(end, step) - begin) * size
            if step <= end:
                return total
            begin = end
        return total + (step - begin) * self.global_batch

    def steps_of(self, samples: int) -> int:
        """Steps that read so many sequences; the last may read more."""
        begin = 0
        for end, size in self.stages:
            if samples <= (end - begin) * size:
                return begin + -(-samples // size)
            samples -= (end - begin) * size
            begin = end
        return begin + -(-samples // self.global_batch)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size of a batch, the largest last."""
        return (*(size for _, size in self.stages), self.global_batch)

    @property
    def end(self) -> int:
        """The first step with the full batch."""
        return self.stages[-1][0] if self.stages else 0


def ramp_problem(stages: list[tuple[int, int]], global_batch: int) -> str | None:
    """Why a ramp is invalid, as the rest of a sentence that starts with `must`; None if it is valid."""
    ends, sizes = [end for end, _ in stages], [size for _, size in stages]
    if any(end < 1 or size < 1 for end, size in stages):
        return "must hold [last step, sequences] pairs of numbers from 1 up, such as [[500, 8], [1000, 16]]"
    if sorted(set(ends)) != ends:
        return f"must have rising steps, such as [[500, 8], [1000, 16]], not {ends}"
    if sorted({*sizes, global_batch}) != [*sizes, global_batch]:
        return f"must have rising numbers of sequences below train.global_batch={global_batch}, not {sizes}"
    return None
