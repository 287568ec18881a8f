"""One optimizer step: microbatches forward and backward, one norm, one update, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.axis import Pending
from weft.job.model_parts.loss_settings import NamedLoss
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.models.build_model import logits, loss_sum
from weft.models.user.eval_metrics import EvalMetrics
from weft.models.user.module import call_module, passes_on, sample_axes, without_padding
from weft.models.user.named_losses import losses_of, task_loss
from weft.models.user.task_losses import TaskLosses, task_samples
from weft.optim.gradient_clip import grad_norm
from weft.optim.schedule import learning_rate
from weft.parallel.context.sequence_split import SequenceSplit
from weft.parallel.data.local_sgd import Apply, Update, UpdateResult
from weft.parallel.spread_model import Batch, LossOf
from weft.planner.plan import Plan
from weft.precision import COMPUTE_DTYPES
from weft.training.state import State


@dataclass
class Gradients:
    """The result of the backward passes: gradients of loss_sum · `scale` / `nominal`, summed over all ranks."""

    loss: Tensor
    """Sum over this rank's valid targets."""
    count: Tensor
    """Valid targets of the samples whose gradients were summed: the global batch, or a replica's share of it."""
    nominal: float
    scale: float
    local_square: Tensor | None = None
    """Square norm of this replica's own gradients; None where they are not whole before the sum."""
    tasks: Tensor | None = None
    """Of several tasks, this rank's sums of losses and numbers of targets (TaskLosses.sums)."""

    @property
    def factor(self) -> Tensor:
        """Multiplied with the gradients, it gives those of the mean loss over all valid targets."""
        return _factor(self.nominal, self.count, self.scale)


def _factor(nominal: float, count: Tensor, scale: float) -> Tensor:
    return (nominal / (count.clamp(min=1) * scale)).float()


@dataclass
class Stepper:
    """Computes the steps of a State."""

    job: Job
    plan: Plan
    mesh: Mesh
    state: State
    before_update: Callable[[], None] = lambda: None
    """Called after the gradients are computed and before the weights change."""
    meanwhile: Callable[[], None] = lambda: None
    """Called while the last gradients of this rank are being reduced."""
    blind: bool = False
    """Tensors have no values, as in a dry run: every step is taken."""

    def __post_init__(self) -> None:
        self.tasks = TaskLosses(self.job, self.mesh.device) if self.job.data.tasks else None
        self.apply: Apply = self.state.rounds.applying(self._apply)

    def gradients(self, batches: list[Batch]) -> Gradients:
        """Forward and backward over this rank's microbatches of one step."""
        state, spread_model, job = self.state, self.state.model, self.job
        spread_model.zero_grad()
        count, counting = self._global_count(batches)
        targets = job.data.seq_len if job.model.has_source else batches[0]["valid"][0].numel()
        nominal = job.train.ramp.batch(state.step) * targets / self.apart
        if self.tasks is not None:
            self.tasks.sums.zero_()
        if state.optimizers.consumes_gradients:
            factor, wanted = _factor(nominal, count, state.scale.value), state.step + 1 not in state.skipped_steps
            state.optimizers.begin_backward(state.step, learning_rate(job, state.step + 1), factor, wanted)
        total = spread_model.backward(
            self.local(batches), self.loss_of(job.train.label_smoothing, self.tasks), state.scale.value / nominal,
            self.meanwhile,
        )  # fmt: skip
        if counting is not None:
            counting.wait()
        known = self.plan.tp == self.plan.cp == self.plan.pp == self.plan.dp_shard == 1 < self.plan.dp_replicate
        square = spread_model.parts[0].local_square() if known and self.plan.sync == "step" else None
        tasks = None if self.tasks is None else self.tasks.sums.clone()
        return Gradients(total, count, nominal, state.scale.value, square, tasks)

    def update(self, grads: Gradients, lr: float) -> tuple[Tensor, bool]:
        """Clip and apply. Returns the norm before clipping, and whether the step was taken.

        It is not taken where the gradients are not finite, or where the step is one of the state's skipped_steps.
        Without dynamic loss scale, a GPU decides the former by itself: True is returned, and only the norm shows it.
        """
        state = self.state
        self.before_update()
        done = self.apply(Update(state.step + 1, grads.factor, lr, grads.count))
        state.model.after_step(done.decided)
        if state.scale.dynamic:
            state.scale.update(done.taken or state.step + 1 in state.skipped_steps)
        state.samples += self.job.train.ramp.batch(state.step)
        state.step += 1
        return done.norm, done.taken

    def _apply(self, update: Update) -> UpdateResult:
        """Clip the gradients that the weights hold, times a factor, and update the weights."""
        state, tables = self.state, self.state.model.tables
        squares = None if tables is None else tables.squares()
        known, limit = state.model.squares_by_id, state.scale.limit
        norm = grad_norm(state.model.counted, self.mesh, squares, known, limit) * update.factor
        clip = self.job.optim.clip
        clipped = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
        finite, wanted = torch.isfinite(norm), update.step not in state.skipped_steps
        unseen = norm.is_cuda and not state.scale.dynamic
        taken = wanted and (unseen or self.blind or bool(finite))
        state.optimizers.applied = None
        if taken:
            flag = finite if unseen else None
            state.optimizers.step_number = update.step - 1
            state.optimizers.step(update.lr, clipped * update.factor, flag)
            if tables is not None:
                tables.update(update.lr, clipped * update.factor, flag)
            if update.average and state.ema.averages:
                state.ema.update(flag)
        return UpdateResult(norm, taken, finite if taken and unseen else taken)

    def learning_rate(self) -> float:
        return learning_rate(self.job, self.state.step + 1)

    @torch.no_grad()
    def evaluate(self, steps: list[list[Batch]], stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """val_loss, the mean over the valid targets of some batches, and the job's metrics, the same on every rank. Of
        several tasks, whose batches are apart, these are also those of each task, and the loss over all. Empty if
        `stop`, which is called between the steps and is the same on every rank, ends it. Where the run has moving
        averages of the weights (train.ema), they are evaluated."""
        state = self.state
        if not state.ema.averages:
            return self._evaluate_tasks(steps, stop)
        with state.optimizers.replaced(state.ema.averages):
            state.model.refresh()
            figures = self._evaluate_tasks(steps, stop)
        state.model.refresh()
        return figures

    def _evaluate_tasks(self, steps: list[list[Batch]], stop: Callable[[], bool]) -> dict[str, float]:
        """The figures of the weights as they are."""
        if self.tasks is None:
            return self._evaluate(steps, stop)[0]
        found: dict[str, float] = {}
        total = count = 0.0
        for number, (name, loss) in enumerate(self.tasks.losses.items()):
            of_task = [batches for step in steps if (batches := [b for b in step if int(b["task"][0]) == number])]
            if of_task:
                figures, targets = self._evaluate(of_task, stop, (name, loss))
                if not figures:
                    return {}
                found |= {f"{key}/{name}": value for key, value in figures.items()}
                total, count = total + figures["val_loss"] * targets * loss.weight, count + targets
        return {"val_loss": total / max(1.0, count), **found}

    def _evaluate(
        self, steps: list[list[Batch]], stop: Callable[[], bool], task: tuple[str, NamedLoss] | None = None
    ) -> tuple[dict[str, float], float]:
        """The figures of some batches, and the number of their valid targets; empty if stopped."""
        batches: list[Batch] = []

        def until_stopped() -> Iterator[list[Batch]]:
            for step in steps:
                if batches and stop():
                    batches.clear()
                    return
                batches.extend(step)
                yield self.local(step)

        join = self._joined if self.plan.cp > 1 else None
        metrics = EvalMetrics(self.job.model, self.job.train.metrics, task if self.job.model.module else None, join)
        loss_of = self.loss_of(0.0) if metrics.plain and not self.job.model.module else self.evaluation_of(metrics)
        found = self.state.model.evaluate(until_stopped(), loss_of).double().reshape(-1)
        if not batches:
            return {}, 0.0
        if len(found) < metrics.size:  # only ranks with a pipeline's last stage have sums
            found = found.new_zeros(metrics.size)
        count = torch.stack([b["valid"].sum() for b in batches]).sum().double()
        sums = torch.cat([found, count.reshape(1) / (self.plan.pp * self.plan.cp)])
        if self.mesh.everyone is not None:
            self.mesh.everyone.all_reduce(sums)  # every rank of a tp group adds the same: the ratio stays
        rows = {part: self._gathered(rows) for part, rows in metrics.all_rows(self.mesh.device).items()}
        *values, total = sums.tolist()
        return metrics.figures(values, total, rows), total

    def evaluation_of(self, metrics: EvalMetrics) -> LossOf:
        """The sums of an evaluation, as the spread model calls them."""
        seed, dtype, model = self.job.train.seed, COMPUTE_DTYPES[self.plan.precision], self.job.model

        def sums(module: nn.Module, batch: Batch, hidden: Any = None) -> Any:
            if model.module:
                together = model.loss == "contrastive"  # ranks compare whole batches
                staged = hasattr(module, "stage")  # stages exchange them
                if not together and not staged:
                    batch, _ = without_padding(batch)
                outputs = call_module(module, batch, model, dtype, hidden)
                if passes_on(module):
                    return outputs
                if staged and not together:
                    batch, outputs = without_padding(batch, outputs)
                if metrics.task is None:
                    return metrics.sums(losses_of(outputs, batch, model, axes=sample_axes(module)), outputs, batch)
                batch = task_samples(batch, metrics.task[0], torch.ones_like(batch["task"], dtype=torch.bool))
                return metrics.sums({"loss": task_loss(*metrics.task, outputs, batch, model)}, outputs, batch)
            loss = loss_sum(module, batch, model, seed=seed, dtype=dtype)
            return metrics.sums({"loss": loss}, logits(module, batch, seed=seed, dtype=dtype), batch)

        return sums

    def _gathered(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, on the host."""
        axis = self.mesh.everyone
        if axis is None:
            return rows.cpu()
        shapes = axis.all_gather(torch.tensor([[len(rows), rows.shape[1]]], device=rows.device), 0).tolist()
        sizes = [size for size, _ in shapes]
        if not any(sizes):
            return rows.cpu()
        padded = rows.new_zeros(max(sizes), max(width for size, width in shapes if size))
        if len(rows):
            padded[: len(rows)] = rows
        gathered = axis.all_gather(padded, 0).cpu().split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    def loss_of(self, smoothing: float, tasks: TaskLosses | None = None) -> LossOf:
        """The job's loss, as the spread model calls it; `tasks` have weights and sums of their own."""
        seed, dtype = self.job.train.seed, COMPUTE_DTYPES[self.plan.precision]

        def loss(module: nn.Module, batch: Batch, hidden: Any = None) -> Any:
            return loss_sum(
                module, batch, self.job.model, seed=seed, smoothing=smoothing, dtype=dtype, hidden=hidden, tasks=tasks
            )

        return loss

    def local(self, batches: list[Batch]) -> list[Batch]:
        """The part of some batches that this rank computes under context parallelism."""
        if self.plan.cp == 1:
            return batches
        cut = SequenceSplit.of(self.plan, self.mesh.coord("cp"))
        part = cut.pairs if self.job.model.has_source else cut.batch
        return [part(b) for b in batches]

    def _joined(self, batch: Batch, x: Tensor) -> Tensor:
        """Tensors [..., tokens] of the whole targets of a batch's part, on one rank of cp; zeros on the others."""
        axis = self.mesh.axis("cp")
        assert axis is not None
        length = int(batch.get("decoder_length", batch["length"]))
        return SequenceSplit.of(self.plan, axis.rank).joined(x, axis, length) * (axis.rank == 0)

    @property
    def apart(self) -> int:
        """Number of replicas whose gradients are not summed in a step."""
        return self.plan.dp_replicate if self.plan.alone else 1

    def _global_count(self, batches: list[Batch]) -> tuple[Tensor, Pending | None]:
        """Valid targets of all ranks that sum their gradients; reduced while the first microbatch is computed."""
        count = torch.stack([b["valid"].sum() for b in batches]).sum().double()
        axis = self.mesh.axis("dp_shard") if self.plan.alone else self.mesh.everyone
        if axis is None:
            return count, None
        same = axis.size // (self.plan.dp // self.apart)  # ranks of the axis that read the same samples
        count = count / same
        return count, axis.start_all_reduce(count)


def evaluation_text(figures: dict[str, float], averaged: bool = False) -> str:
    """The figures of an evaluation, as text; `averaged` weights are mentioned."""
    rest = [f"{name.removeprefix('val_')} {value:.4f}" for name, value in figures.items() if name != "val_loss"]
    text = ", ".join([f"validation loss {figures['val_loss']:.4f}", *rest])
    return f"{text} (averaged weights)" if averaged else text
