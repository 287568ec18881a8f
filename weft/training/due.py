"""When evaluations and checkpoints are due: every n steps, after each epoch, and after the last step."""

from __future__ import annotations

from dataclasses import dataclass

from weft.data.dataset import Dataset
from weft.data.sample_order import epoch_len
from weft.job.schema import Job
from weft.job.train import BatchRamp


@dataclass(frozen=True)
class Calendar:
    """The steps of a run and its epochs."""

    steps: int
    epoch_samples: int
    ramp: BatchRamp

    @classmethod
    def of(cls, job: Job, dataset: Dataset) -> Calendar:
        train = job.train
        return cls(train.steps, epoch_len(dataset, train.global_batch, job.data.drop_last), train.ramp)

    def epochs(self, step: int) -> float:
        """Passes over the training samples that the first `step` steps make."""
        return self.ramp.samples_before(step) / max(1, self.epoch_samples)

    def newest(self, every: int | str, step: int) -> int:
        """The last step up to `step` at which something is due; 0 if it has not been due yet."""
        return step if step >= self.steps and every != "never" else self._newest_recurrence(every, step)

    def due(self, every: int | str, step: int, before: int | None = None) -> bool:
        """Whether something is due in the steps (before, step]; `before` is the step before by default."""
        return self.newest(every, step) > (step - 1 if before is None else before)

    def recurs(self, every: int | str, step: int) -> bool:
        """Whether something is due at a step for another reason than that the run ends."""
        return 0 < self._newest_recurrence(every, step) == step

    def name(self, step: int) -> str:
        """The step in messages, with the number of the epoch that it ends."""
        return f"epoch {int(self.epochs(step))}, step {step}" if self.recurs("epoch", step) else f"step {step}"

    def _newest_recurrence(self, every: int | str, step: int) -> int:
        if every == "epoch":
            return self.ramp.steps_of(int(self.epochs(step)) * max(1, self.epoch_samples))
        return step // int(every) * int(every) if every and every != "never" else 0
