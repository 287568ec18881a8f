"""`weft.lightning.fit`: trains a LightningModule on Weft's ranks, layouts and checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from weft.extensions.adapters.accelerate.accelerator import Accelerator
from weft.extensions.adapters.lightning_callbacks import known_callbacks
from weft.extensions.adapters.training import plain_values, to_device
from weft.job.errors import JobError
from weft.job.load import load_job
from weft.job.schema import Job

OVERRIDES = (
    "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward", "configure_gradient_clipping",
    "transfer_batch_to_device", "configure_model", "configure_sharded_model", "toggle_optimizer",
)  # fmt: skip
"""Methods that fit does itself; a module that replaces one of them is refused."""


class Loops:
    """The state of a fit, with the attributes of a Trainer that modules and callbacks read."""

    def __init__(self, module: Any, datamodule: Any, job: Job, folder: Path, max_epochs: int, max_steps: int):
        self.lightning_module, self.datamodule, self.job, self.folder = module, datamodule, job, folder
        self.max_epochs, self.max_steps = max_epochs, max_steps
        accumulation = job.train.accumulation
        self.accelerator = Accelerator(
            job=job, gradient_accumulation_steps=1 if accumulation == "auto" else accumulation,
            step_scheduler_with_optimizer=False,
        )  # fmt: skip
        self.current_epoch = self.global_step = 0
        self.batches_done, self.epoch_done = 0, False
        """Batches of the current epoch that were trained on, and whether it is over."""
        self.should_stop, self.sanity_checking, self.fast_dev_run, self.training = False, False, False, True
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, Any] = {}
        self.optimizers: list[Any] = []
        self.callbacks: list[Any] = []
        self.logger, self.loggers = None, list[Any]()
        self.losses: list[float] = []
        """The mean training loss over ranks of every batch."""
        self._pending: list[tuple[Tensor, dict[str, Any]]] = []
        self._sums: dict[str, list[tuple[float, float]]] = {}
        self._stage, self._batch_size = "train", 1

    @property
    def is_global_zero(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def global_rank(self) -> int:
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        return self.accelerator.local_process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def num_devices(self) -> int:
        return self.accelerator.num_processes

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of the module and of the callbacks, where they have it."""
        for callback in self.callbacks:
            if (method := getattr(callback, hook, None)) is not None:
                method(self, self.lightning_module, *args)
        if (method := getattr(self.lightning_module, hook, None)) is not None:
            method(*args)

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, sync_dist: bool = False, batch_size: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """LightningModule.log: values of steps, and their mean over an epoch where asked or in validation."""
        number = float(value.detach() if isinstance(value, Tensor) else value)
        in_training = self._stage == "train"
        by_step = in_training if on_step is None else on_step
        by_epoch = not in_training if on_epoch is None else on_epoch
        if by_epoch:
            self._sums.setdefault(name, []).append((number, float(batch_size or self._batch_size)))
        if by_step:
            self._record(f"{name}_step" if by_epoch else name, number)

    def log_dict(self, values: dict[str, Any], **options: Any) -> None:
        for name, value in values.items():
            self.log(name, value, **options)

    def _record(self, name: str, value: float) -> None:
        self.logged_metrics[name] = self.callback_metrics[name] = torch.tensor(value)

    def _end_epoch_sums(self) -> None:
        """Means over the samples of all ranks."""
        for name, values in self._sums.items():
            mine = torch.tensor([sum(v * n for v, n in values), sum(n for _, n in values)], dtype=torch.float64)
            total = self.accelerator.reduce(mine.to(self.accelerator.device).float())
            self._record(name, float(total[0] / total[1]))
        self._sums = {}

    def record_batch(self, loss: Tensor) -> None:
        """Keep a batch's loss; from time to time those of all ranks are averaged and written."""
        values = {name: float(value) for name, value in self.logged_metrics.items()}
        self._pending.append((loss, {"step": self.global_step, "epoch": self.current_epoch, **values}))
        if len(self._pending) >= self.job.watch.every:
            self.write_metrics()

    def write_metrics(self) -> None:
        """Add lines to metrics.jsonl, one for each batch since the last call."""
        if not self._pending:
            return
        means = self.accelerator.reduce(torch.stack([loss for loss, _ in self._pending]), "mean").tolist()
        self.losses += means
        if self.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                for (_, record), loss in zip(self._pending, means, strict=True):
                    file.write(json.dumps({**record, "loss": loss}) + "\n")
        self._pending = []

    @contextlib.contextmanager
    def _as_forward(self, method: Callable[..., Any]) -> Iterator[nn.Module]:
        """The module with a method as its forward, so that hooks of the root module apply to it."""
        module, before = self.lightning_module, self.lightning_module.forward

        def call(*args: Any) -> Any:
            module.forward = before
            with self.accelerator.autocast():
                return method(*args)

        module.forward = call
        try:
            yield module
        finally:
            module.forward = before

    def loader(self, source: Any) -> Any:
        """A loader with the samples of this rank, as Lightning's distributed sampler has them."""
        loader = source() if callable(source) and not isinstance(source, DataLoader) else source
        if not isinstance(loader, DataLoader):
            raise JobError(f"a data loader must be a torch DataLoader, not a {type(loader).__name__}")
        ranks, plan = self.accelerator.mesh, self.accelerator.plan
        if plan.dp == 1 or isinstance(loader.dataset, IterableDataset):
            return loader
        sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, plan.dp, ranks.dp_rank(plan), shuffle=isinstance(loader.sampler, RandomSampler),
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")), drop_last=False,
        )  # fmt: skip
        return DataLoader(
            loader.dataset, batch_size=loader.batch_size, sampler=sampler, num_workers=loader.num_workers,
            collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, drop_last=loader.drop_last,
        )  # fmt: skip

    def validate(self, loader: Any) -> None:
        """One pass over the validation data."""
        module, training = self.lightning_module, self.accelerator.training
        assert training is not None
        self._stage = "validate"
        self.call("on_validation_start")
        self.call("on_validation_epoch_start")
        with training.evaluation():
            for index, batch in enumerate(loader):
                moved = to_device(batch, self.accelerator.device)
                self._batch_size = _size(moved)
                with self._as_forward(module.validation_step) as root:
                    root(moved, index)
        self._end_epoch_sums()
        self.call("on_validation_epoch_end")
        self._end_epoch_sums()
        self.call("on_validation_end")
        self._stage = "train"

    def save_checkpoint(self, folder: Path | str | None = None, *args: Any) -> None:
        """Write a checkpoint that every layout can load. Called on every rank."""
        training = self.accelerator.training
        assert training is not None
        meta = {
            "epoch": self.current_epoch + self.epoch_done, "global_step": self.global_step,
            "batches": 0 if self.epoch_done else self.batches_done,
            "schedulers": [plain_values(s.scheduler.state_dict()) for s in self.accelerator.schedulers],
        }  # fmt: skip
        training.save(Path(folder or self.folder / "checkpoints"), self.global_step, meta)


def _size(batch: Any) -> int:
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return int(batch.shape[0]) if isinstance(batch, Tensor) and batch.dim() else 1


def _configured(found: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The optimizer and the schedules of configure_optimizers, in any of its forms."""
    schedules: Any = []
    if isinstance(found, dict):
        schedules = [found["lr_scheduler"]] if found.get("lr_scheduler") is not None else []
        found = found["optimizer"]
    elif isinstance(found, list | tuple):
        if len(found) == 2 and isinstance(found[0], list | tuple):
            found, schedules = found
        elif found and isinstance(found[0], dict):
            if len(found) > 1:
                raise JobError(f"configure_optimizers returned {len(found)} optimizers; one is supported")
            return _configured(found[0])
    if isinstance(found, list | tuple):
        if len(found) != 1:
            raise JobError(f"configure_optimizers returned {len(found)} optimizers; one is supported")
        found = found[0]
    if found is None:
        raise JobError("configure_optimizers returned nothing; it must return an optimizer")
    plain = [s if isinstance(s, dict) else {"scheduler": s} for s in schedules]
    return found, [{"interval": "epoch", "frequency": 1, **s} for s in plain]


def check_module(module: Any) -> None:
    """Refuse what fit does not support, before anything starts."""
    for method in ("training_step", "configure_optimizers"):
        if not callable(getattr(module, method, None)):
            raise JobError(f"{type(module).__name__} has no {method}; weft.lightning.fit takes a LightningModule")
    if getattr(module, "automatic_optimization", True) is False:
        raise JobError("automatic_optimization=False is not supported; use weft.Accelerator for a loop of your own")
    base = next((c for c in type(module).__mro__ if c.__name__ == "LightningModule"), nn.Module)
    for name in OVERRIDES:
        own = getattr(type(module), name, None)
        if own is not None and own is not getattr(base, name, None):
            raise JobError(f"{type(module).__name__}.{name} is not supported: weft.lightning.fit does this itself")


def fit(
    module: Any, datamodule: Any = None, job: Any = None, *, train_dataloaders: Any = None,
    val_dataloaders: Any = None, callbacks: list[Any] | None = None, max_epochs: int | None = None,
    max_steps: int | None = None, ckpt_path: str | Path | None = None,
) -> Loops:  # fmt: skip
    """Train a LightningModule. A data loader in the place of `datamodule` is that of training, as Trainer.fit takes it,
    and one after it that of validation. `job` gives layout, precision, train.steps, train.accumulation, optim.clip and
    checkpoint.every; returns the loops with losses and metrics."""
    if isinstance(datamodule, DataLoader):
        datamodule, train_dataloaders = None, datamodule
        if isinstance(job, DataLoader):
            job, val_dataloaders = None, job
    described = load_job(job) if isinstance(job, str) else job or Job(precision="fp32", name="lightning")
    check_module(module)
    known = known_callbacks([*(callbacks or ())])
    if datamodule is None and train_dataloaders is None and not callable(getattr(module, "train_dataloader", None)):
        raise JobError("weft.lightning.fit needs a datamodule or train_dataloaders")
    given = described.train.model_fields_set
    steps = max_steps if max_steps is not None else described.train.steps if "steps" in given else -1
    epochs = max_epochs if max_epochs is not None else 1000 if steps < 0 else -1
    loops = Loops(module, datamodule, described, Path(described.runs_dir) / described.name, epochs, steps)
    loops.callbacks = known
    _run(loops, train_dataloaders, val_dataloaders, ckpt_path)
    return loops


def _run(loops: Loops, train_source: Any, val_source: Any, ckpt_path: str | Path | None) -> None:
    module, accelerator, data = loops.lightning_module, loops.accelerator, loops.datamodule
    with contextlib.suppress(AttributeError, TypeError):
        module.trainer = loops
    object.__setattr__(module, "log", loops.log)
    object.__setattr__(module, "log_dict", loops.log_dict)
    if data is not None:
        if accelerator.is_local_main_process:
            data.prepare_data()
        accelerator.wait_for_everyone()
        data.setup("fit")
        train_source = train_source or data.train_dataloader
        val_source = val_source or (data.val_dataloader if _has_validation(data, module) else None)
    train_loader = loops.loader(train_source or module.train_dataloader)
    val_loader = loops.loader(val_source) if val_source is not None and hasattr(module, "validation_step") else None
    optimizer, schedules = _configured(module.configure_optimizers())
    accelerator.prepare(module)
    prepared = accelerator.prepare(optimizer)
    loops.optimizers = [prepared]
    moving = [{**s, "scheduler": accelerator.prepare(s["scheduler"])} for s in schedules]
    if ckpt_path is not None:
        assert accelerator.training is not None
        found = accelerator.training.load(ckpt_path)
        loops.current_epoch, loops.global_step = int(found["epoch"]), int(found["global_step"])
        loops.batches_done = int(found["batches"])
        for prepared_schedule, state in zip(accelerator.schedulers, found["schedulers"], strict=False):
            prepared_schedule.scheduler.load_state_dict(state)
    for hook in ("on_fit_start", "on_train_start"):
        loops.call(hook)
    while not loops.should_stop and loops.current_epoch != loops.max_epochs and loops.global_step != loops.max_steps:
        _train_epoch(loops, train_loader, prepared, moving)
        loops.write_metrics()
        if val_loader is not None:
            loops.validate(val_loader)
        loops._end_epoch_sums()
        for schedule in moving:
            if schedule["interval"] == "epoch" and (loops.current_epoch + 1) % schedule["frequency"] == 0:
                _move(schedule, loops)
        loops.epoch_done = True
        loops.call("on_train_epoch_end")
        loops.current_epoch, loops.batches_done, loops.epoch_done = loops.current_epoch + 1, 0, False
    for hook in ("on_train_end", "on_fit_end"):
        loops.call(hook)


def _has_validation(data: Any, module: Any) -> bool:
    base = next((c for c in type(data).__mro__ if c.__name__ in ("DataHooks", "LightningDataModule")), None)
    own = getattr(type(data), "val_dataloader", None)
    return own is not None and own is not getattr(base, "val_dataloader", None) and hasattr(module, "validation_step")


def _move(schedule: dict[str, Any], loops: Loops) -> None:
    scheduler = schedule["scheduler"].scheduler
    if type(scheduler).__name__ == "ReduceLROnPlateau":
        monitor = schedule.get("monitor")
        if monitor not in loops.callback_metrics:
            raise JobError(f"ReduceLROnPlateau monitors {monitor!r}, which was not logged")
        scheduler.step(float(loops.callback_metrics[monitor]))
    else:
        scheduler.step()


def _train_epoch(loops: Loops, loader: Any, optimizer: Any, schedules: list[dict[str, Any]]) -> None:
    module, accelerator, job = loops.lightning_module, loops.accelerator, loops.job
    clip = job.optim.clip if "clip" in job.optim.model_fields_set else 0.0
    set_every = job.checkpoint.every if "every" in job.checkpoint.model_fields_set else 0
    every = set_every if isinstance(set_every, int) else 0
    module.train()
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        loader.sampler.set_epoch(loops.current_epoch)
    loops.call("on_train_epoch_start")
    total = len(loader) if hasattr(loader, "__len__") else 0
    for index, batch in enumerate(loader):
        if index < loops.batches_done:
            continue  # trained on before the checkpoint that was loaded
        moved = to_device(batch, accelerator.device)
        loops._batch_size = _size(moved)
        accelerator.sync_gradients = (index + 1) % accelerator.gradient_accumulation_steps == 0 or index + 1 == total
        loops.call("on_train_batch_start", moved, index)
        with loops._as_forward(module.training_step) as root:
            found = root(moved, index)
        if found is None:
            raise JobError("training_step returned None, which skips a batch; every rank must return a loss")
        loss = found["loss"] if isinstance(found, dict) else found
        accelerator.backward(loss)
        loops.call("on_after_backward")
        if accelerator.sync_gradients:
            loops.call("on_before_optimizer_step", optimizer)
            if clip:
                accelerator.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            loops.call("on_before_zero_grad", optimizer)
            optimizer.zero_grad()
            loops.global_step += 1
            for schedule in schedules:
                if schedule["interval"] == "step" and loops.global_step % schedule["frequency"] == 0:
                    _move(schedule, loops)
        loops.batches_done = index + 1
        loops.call("on_train_batch_end", found, moved, index)
        loops.record_batch(loss.detach().float())
        if every and accelerator.sync_gradients and loops.global_step % every == 0:
            loops.save_checkpoint()
        if loops.should_stop or loops.global_step == loops.max_steps:
            break
