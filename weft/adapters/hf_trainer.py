"""`WeftTrainer`: the interface of transformers' Trainer and its TrainingArguments, on Weft's layouts."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from weft.adapters.accelerator import Accelerator, set_seed
from weft.adapters.training import to_device
from weft.convert.settings import Settings, find_rule, flatten
from weft.convert.training_arguments import TABLE
from weft.job.errors import JobError
from weft.job.load import load_job
from weft.job.schema import Job

HANDLED = (
    "adam_*", "bf16", "data_seed", "dataloader_drop_last", "disable_tqdm", "eval_steps", "eval_strategy", "fp16",
    "gradient_accumulation_steps", "gradient_checkpointing", "learning_rate", "logging_steps", "logging_strategy",
    "lr_scheduler_kwargs*", "lr_scheduler_type", "max_grad_norm", "max_steps", "num_train_epochs", "optim",
    "output_dir", "per_device_eval_batch_size", "per_device_train_batch_size", "save_steps", "save_strategy", "seed",
    "use_cpu", "warmup_*", "weight_decay",
)  # fmt: skip
"""Fields that WeftTrainer uses, whatever a job can hold."""
WITHOUT_EFFECT = ("ddp_timeout", "eval_delay", "log_level*", "no_cuda", "optim_args", "run_name", "save_total_limit")
"""Fields that change no result and may be set."""


@dataclass
class TrainOutput:
    """What train() returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass
class TrainerState:
    """Progress of a training."""

    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)


def check_arguments(args: Any) -> None:
    """Refuse fields of TrainingArguments that were set and that nothing here does."""
    plain = type(args)(output_dir=args.output_dir)
    given, usual = flatten(args.to_dict()), flatten(plain.to_dict())
    settings, accepted = Settings(given), dict.fromkeys((*HANDLED, *WITHOUT_EFFECT), TABLE["seed"])
    for key, value in given.items():
        if value == usual.get(key) or find_rule(accepted, key) is not None:
            continue
        rule = find_rule(TABLE, key)
        if rule is None:
            raise JobError(
                f"TrainingArguments.{key}={value!r} is not supported; docs/your-own-code.md lists the fields"
            )
        found = rule(value, settings)
        if found.status == "no counterpart":
            raise JobError(f"TrainingArguments.{key}={value!r} is not supported: {found.note}")
        if found.job:
            fields = ", ".join(f"{name}={new}" for name, new in found.job.items())
            raise JobError(
                f"TrainingArguments.{key}={value!r} is not used by WeftTrainer; leave it out, and give job=… with "
                f"{fields} if it is a layout, communication or train.compile"
            )


class WeftTrainer:
    """Trains a transformers model with TrainingArguments. `job` chooses the layout and communication."""

    def __init__(
        self, model: nn.Module, args: Any, data_collator: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, compute_metrics: Any = None,
        callbacks: list[Any] | None = None, optimizers: tuple[Any, Any] = (None, None), job: Job | str | None = None,
        **others: Any,
    ):  # fmt: skip
        if others := {k: v for k, v in others.items() if v is not None}:
            raise JobError(
                f"WeftTrainer({next(iter(others))}=…) is not supported; docs/your-own-code.md lists the arguments"
            )
        if compute_metrics is not None or callbacks:
            what = "compute_metrics" if compute_metrics is not None else "callbacks"
            raise JobError(f"WeftTrainer({what}=…) is not supported; evaluate() returns the loss")
        check_arguments(args)
        set_seed(args.seed)
        described = load_job(job) if isinstance(job, str) else job or Job(precision="fp32")
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        self.accelerator = Accelerator(
            cpu=bool(args.use_cpu), mixed_precision=precision, job=described, step_scheduler_with_optimizer=False,
            gradient_accumulation_steps=1,
        )  # fmt: skip
        self.args, self.collator = args, data_collator or _default_collator()
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.optimizer, self.lr_scheduler = optimizers
        self.state = TrainerState()
        self._counts_items = "num_items_in_batch" in inspect.signature(model.forward).parameters or any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()
        )
        self._shifts_labels = _predicts_next_token(model)
        self._unlogged: list[float] = []  # losses of the steps since the last log
        enable: Any = getattr(model, "gradient_checkpointing_enable", None)
        if args.gradient_checkpointing and enable is not None:
            enable()
        self.model = model
        self._prepared = False

    def _loader(self, dataset: Any, size: int, shuffled: bool) -> Any:
        sampler = None
        if shuffled:
            sampler = RandomSampler(dataset, generator=torch.Generator())
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=size,
            sampler=sampler,
            collate_fn=self.collator,
            drop_last=self.args.dataloader_drop_last,
        )
        return self.accelerator.prepare(loader), sampler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """AdamW without decay of biases and norms, and the schedule of the arguments."""
        from transformers import get_scheduler
        from transformers.trainer_pt_utils import get_parameter_names

        args = self.args
        if self.optimizer is None:
            kind = str(getattr(args.optim, "value", args.optim))
            if not kind.startswith("adamw_torch"):
                raise JobError(f"TrainingArguments.optim={kind} is not supported; adamw_torch, or give optimizers=…")
            names = get_parameter_names(
                self.model, [nn.LayerNorm], ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)"]
            )
            named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for n, p in named if n in names], "weight_decay": args.weight_decay},
                {"params": [p for n, p in named if n not in names], "weight_decay": 0.0},
            ]
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                args.lr_scheduler_type, self.optimizer, args.get_warmup_steps(num_training_steps), num_training_steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs or {},
            )  # fmt: skip

    def _prepare(self, steps: int) -> None:
        if not self._prepared:
            if steps:
                self.create_optimizer_and_scheduler(steps)
            self.model = self.accelerator.prepare(self.model)
            if steps:
                self.optimizer = self.accelerator.prepare(self.optimizer)
                self.lr_scheduler = self.accelerator.prepare(self.lr_scheduler)
            self._prepared = True

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train for the epochs or steps of the arguments."""
        args, accelerator = self.args, self.accelerator
        if self.train_dataset is None:
            raise JobError("train needs train_dataset=…")
        loader, sampler = self._loader(self.train_dataset, args.per_device_train_batch_size, shuffled=True)
        passes = args.gradient_accumulation_steps
        per_epoch = max(1, -(-len(loader) // passes))
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        self._prepare(steps)
        self.state.max_steps = steps
        if resume_from_checkpoint:
            folder = Path(args.output_dir) / "checkpoints" if resume_from_checkpoint is True else resume_from_checkpoint
            accelerator.load_state(folder)
            self.state.global_step = int(self.lr_scheduler.scheduler.last_epoch)
        total, counted, epoch = 0.0, 0, self.state.global_step // per_epoch
        skip = self.state.global_step % per_epoch
        seed = args.data_seed if args.data_seed is not None else args.seed
        while self.state.global_step < steps:
            sampler.generator.manual_seed(seed + epoch)
            self.model.train()
            for number, batches in enumerate(_groups(loader, passes)):
                if number < skip:
                    continue
                self._unlogged.append(self._step(batches))
                total, counted = total + self._unlogged[-1], counted + 1
                self.state.epoch = epoch + (number + 1) / per_epoch
                self._log()
                if self.state.global_step >= steps:
                    break
            epoch, skip = epoch + 1, 0
        return TrainOutput(self.state.global_step, total / max(1, counted), {"train_loss": total / max(1, counted)})

    def _count_targets(self, batch: Any) -> Tensor:
        """Targets of a batch; the first label of a sequence is none if the loss predicts the next token."""
        if "shift_labels" in batch:
            found: Tensor = (batch["shift_labels"] != -100).sum()
            return found
        labels = batch["labels"][..., 1:] if self._shifts_labels else batch["labels"]
        return (labels != -100).sum()

    def _step(self, batches: list[Any]) -> float:
        """One optimizer step. The loss is a mean over the targets of all batches and ranks, where the model takes
        their number, else over batches."""
        accelerator, args, dp = self.accelerator, self.args, self.accelerator.num_processes
        items: Tensor | None = None
        if self._counts_items and all("labels" in batch for batch in batches):
            mine = sum(int(self._count_targets(batch)) for batch in batches)
            items = accelerator.reduce(torch.tensor(float(mine), device=accelerator.device))
        total = torch.zeros((), device=accelerator.device)
        for i, batch in enumerate(batches):
            accelerator.sync_gradients = i == len(batches) - 1
            extra = {} if items is None else {"num_items_in_batch": items}
            outputs = self.model(**batch, **extra)
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs.loss
            loss = loss / len(batches) if items is None else loss * dp
            accelerator.backward(loss)
            total += loss.detach()
        if args.max_grad_norm:
            accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
        self.optimizer.step()
        if not self.optimizer.step_was_skipped:
            self.lr_scheduler.scheduler.step()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        return float(accelerator.reduce(total, "mean"))

    def _log(self) -> None:
        args, step = self.args, self.state.global_step
        if _due(args.logging_strategy, args.logging_steps, step, self.state):
            rate = self.optimizer.param_groups[0]["lr"]
            self.log({"loss": sum(self._unlogged) / len(self._unlogged), "learning_rate": rate})
            self._unlogged.clear()
        if self.eval_dataset is not None and _due(
            args.eval_strategy, args.eval_steps or args.logging_steps, step, self.state
        ):
            self.evaluate()
            self.model.train()
        if _due(args.save_strategy, args.save_steps, step, self.state):
            self.accelerator.save_iteration = step
            self.accelerator.save_state(Path(args.output_dir) / "checkpoints")

    def log(self, values: dict[str, float]) -> None:
        """Add values to state.log_history, and print them."""
        record = {**values, "epoch": round(self.state.epoch, 4), "step": self.state.global_step}
        self.state.log_history.append(record)
        if not self.args.disable_tqdm:
            self.accelerator.print(json.dumps(record))

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The mean loss over the batches of the evaluation data."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise JobError("evaluate needs eval_dataset=…")
        self._prepare(0)
        loader, _ = self._loader(dataset, self.args.per_device_eval_batch_size, shuffled=False)
        training, losses = self.accelerator.training, []
        assert training is not None
        with training.evaluation():
            for batch in loader:
                counted = self._counts_items and "labels" in batch  # as transformers divides the loss
                extra = {"num_items_in_batch": self._count_targets(batch)} if counted else {}
                outputs = self.model(**to_device(batch, self.accelerator.device), **extra)
                size = next(iter(batch.values())).shape[0]
                repeated = self.accelerator.gather_for_metrics(outputs["loss"].detach().repeat(size))
                losses.append(repeated)
        found = {f"{metric_key_prefix}_loss": float(torch.cat(losses).mean())}
        self.log(found)
        return found

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model as transformers reads it. Call it on every rank."""
        folder, weights = output_dir or self.args.output_dir, self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            model: Any = self.model
            model.save_pretrained(folder, state_dict=weights)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        self.accelerator.wait_for_everyone()


def _predicts_next_token(model: Any) -> bool:
    """Whether the loss of a model of transformers is that of a causal language model."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return decoder and LOSS_MAPPING.get(getattr(model, "loss_type", "")) is ForCausalLMLoss


def _default_collator() -> Any:
    from transformers import default_data_collator

    return default_data_collator


def _groups(loader: Any, size: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _due(strategy: Any, every: float, step: int, state: TrainerState) -> bool:
    kind = str(getattr(strategy, "value", strategy))
    if kind == "epoch":
        return abs(state.epoch - round(state.epoch)) < 1e-9
    interval = max(1, round(every * state.max_steps) if every < 1 else int(every))
    return kind == "steps" and step % interval == 0
