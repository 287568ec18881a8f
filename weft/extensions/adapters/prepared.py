"""The optimizer and the schedule that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from weft.extensions.adapters.optimizer_wrapper import OptimizerWrapper
from weft.job.errors import JobError

if TYPE_CHECKING:
    from weft.extensions.adapters.accelerator import Accelerator


class PreparedOptimizer(OptimizerWrapper):
    """An optimizer that takes a step where gradients were summed, and none while they are accumulated."""

    def __init__(self, optimizer: Optimizer, accelerator: Accelerator):
        super().__init__(optimizer)
        self.accelerator, self.step_was_skipped = accelerator, False

    def add_param_group(self, param_group: Any) -> None:
        raise JobError("a prepared optimizer takes no more parameters; add the group before prepare")

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise JobError("a prepared optimizer takes no closure; call backward before step")
        if self.accelerator.sync_gradients:
            training = self.accelerator.training
            assert training is not None
            self.step_was_skipped = not training.step(self.optimizer.step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.accelerator.sync_gradients and self.accelerator.training is not None:
            self.accelerator.training.zero_grad()

    def train(self) -> None:
        """Nothing to change."""

    def eval(self) -> None:
        """Nothing to change."""

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


class PreparedScheduler:
    """A schedule that moves with the optimizer's steps. As in Accelerate, one call is a step for each data-parallel
    rank, unless split_batches is set: a schedule counts the batches of one process."""

    def __init__(self, scheduler: Any, accelerator: Accelerator):
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
