"""Several tasks in a batch: the weight of each sample's loss, and the loss of each task in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weft.job.model_parts.loss_settings import NamedLoss
from weft.job.schema import Job

Batch = dict[str, Tensor]


class TaskLosses:
    """The tasks of a job, by number in the order of data.mixture, and sums over the targets of a step."""

    def __init__(self, job: Job, device: torch.device):
        named = job.model.loss if isinstance(job.model.loss, str) else "auto"
        default = NamedLoss(function="auto" if named in ("model", "contrastive") else named)
        self.losses = {each.name: each.loss or default for each in job.data.mixture if each.name is not None}
        self.weights = torch.tensor([loss.weight for loss in self.losses.values()], device=device)
        self.sums = torch.zeros(2, len(self.losses), dtype=torch.float64, device=device)
        """Of each task: the losses of its targets without their weight, and the number of targets."""

    def weighted(self, batch: Batch) -> Tensor:
        """The weight of each target of a batch; 0 for those that are masked."""
        valid = batch["valid"]
        return valid * self._of_targets(self.weights[batch["task"]], valid)

    def add(self, batch: Batch, losses: Tensor) -> None:
        """Add the losses of a batch's targets, in their order."""
        valid = batch["valid"]
        tasks = self._of_targets(batch["task"], valid).reshape(-1)
        self.sums.index_add_(1, tasks, torch.stack([losses.detach().double(), valid.reshape(-1).double()]))

    def add_sums(self, task: int, loss: Tensor, count: Tensor) -> None:
        """Add the summed loss of some targets of one task."""
        self.sums[:, task] += torch.stack([loss.detach().double(), count.double()])

    @staticmethod
    def _of_targets(values: Tensor, valid: Tensor) -> Tensor:
        """Values of samples as values of their targets."""
        return values.view(-1, *[1] * (valid.dim() - 1)).expand_as(valid)

    def parts(self, batch: Batch, outputs: Any) -> Iterator[tuple[int, str, NamedLoss, Batch, Any]]:
        """Number, name and loss of each task, and its samples of a batch with their outputs."""
        for number, (name, loss) in enumerate(self.losses.items()):
            inside = batch["task"] == number
            yield number, name, loss, task_samples(batch, name, inside), samples_of(outputs, inside)


def task_samples(batch: Batch, name: str, inside: Tensor) -> Batch:
    """The samples of a task with its targets alone, which have its name in a mixture of your own datasets."""
    own = f"targets/{name}"
    found = {key: value[inside] for key, value in batch.items() if not key.startswith("targets/")}
    found |= {
        key.replace(own, "targets", 1): value[inside]
        for key, value in batch.items()
        if key == own or key.startswith(f"{own}/")
    }
    return found


def samples_of(outputs: Any, inside: Tensor) -> Any:
    """The outputs of the samples that a mask [batch] marks; values that are not of samples stay."""
    if isinstance(outputs, dict):
        return {key: samples_of(value, inside) for key, value in outputs.items()}
    if isinstance(outputs, tuple):
        return tuple(samples_of(value, inside) for value in outputs)
    whole = isinstance(outputs, Tensor) and outputs.dim() > 0 and len(outputs) == len(inside)
    return outputs[inside] if whole else outputs
