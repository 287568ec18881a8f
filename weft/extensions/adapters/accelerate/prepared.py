"""The optimizer and the schedule that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim import Optimizer

from weft.extensions.adapters.optimizer_wrapper import OptimizerWrapper
from weft.job.errors import JobError

if TYPE_CHECKING:
    from weft.extensions.adapters.training import SpreadTraining


class Accumulating(Protocol):
    """What is used of an Accelerator."""

    sync_gradients: bool
    only_accumulate: bool
    step_scheduler_with_optimizer: bool
    optimizers: list[PreparedOptimizer]

    @property
    def split_batches(self) -> bool: ...

    @property
    def num_processes(self) -> int: ...


class PreparedOptimizer(OptimizerWrapper):
    """An optimizer that takes a step where gradients were summed, and none while they are accumulated."""

    def __init__(self, optimizer: Optimizer, accelerator: Accumulating, training: SpreadTraining):
        super().__init__(optimizer)
        self.accelerator, self.training, self.step_was_skipped = accelerator, training, False

    def add_param_group(self, param_group: Any) -> None:
        raise JobError("a prepared optimizer takes no more parameters; add the group before prepare")

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise JobError("a prepared optimizer takes no closure; call backward before step")
        if not self.accelerator.sync_gradients:
            return
        training = self.training
        if not training.complete and any(p.grad is not None for p in training.model.grad_params.values()):
            if self.accelerator.only_accumulate:
                training.close_alone()
            elif training.plan.dp > 1 and not training.begun:
                raise JobError(
                    "gradients were not summed over ranks: call accelerator.backward(loss), not loss.backward()"
                )
        self.step_was_skipped = not training.step(self.optimizer.step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.accelerator.sync_gradients:
            self.training.zero_grad()

    def train(self) -> None:
        """Set an optimizer that has modes, such as a schedule-free one, to training."""
        if callable(mode := getattr(self.optimizer, "train", None)):
            mode()

    def eval(self) -> None:
        """Set an optimizer that has modes to evaluation."""
        if callable(mode := getattr(self.optimizer, "eval", None)):
            mode()

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


class PreparedScheduler:
    """A schedule that moves with the optimizer's steps. As in Accelerate, one call is a step for each data-parallel
    rank, unless split_batches is set: a schedule counts the batches of one process."""

    def __init__(self, scheduler: Any, accelerator: Accumulating):
        self.scheduler, self.accelerator = scheduler, accelerator

    def step(self, *args: Any, **kwargs: Any) -> None:
        accelerator = self.accelerator
        if not accelerator.step_scheduler_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not accelerator.sync_gradients or any(o.step_was_skipped for o in accelerator.optimizers):
            return
        for _ in range(1 if accelerator.split_batches else accelerator.num_processes):
            if getattr(self.scheduler, "total_steps", 0) and self.scheduler.last_epoch >= self.scheduler.total_steps:
                return
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
