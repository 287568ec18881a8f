"""`WeftTrainer`: the interface of transformers' Trainer and its TrainingArguments, on Weft's layouts."""

from __future__ import annotations

import inspect
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from weft.extensions.adapters.accelerate.accelerator import Accelerator, set_seed
from weft.extensions.adapters.transformers.hf_arguments import check_arguments, make_optimizer
from weft.extensions.adapters.transformers.hf_evaluation import evaluate_batches, predicted
from weft.extensions.adapters.transformers.hf_samples import (
    default_collator,
    groups,
    predicts_next_token,
    used_columns,
    uses,
)
from weft.job.errors import JobError
from weft.job.load import load_job
from weft.job.schema import Job

STATE_FILE = "trainer_state.json"
"""Progress and logs, in the format of transformers."""


class WeftTrainer:
    """Trains a transformers model with TrainingArguments. `job` chooses the layout and communication."""

    def __init__(
        self, model: nn.Module, args: Any, data_collator: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, compute_metrics: Any = None,
        callbacks: list[Any] | None = None, optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None, job: Job | str | None = None, **others: Any,
    ):  # fmt: skip
        from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
        from transformers.utils import find_labels

        if others := {k: v for k, v in others.items() if v is not None}:
            raise JobError(
                f"WeftTrainer({next(iter(others))}=…) is not supported; docs/your-own-code.md lists the arguments"
            )
        check_arguments(args)
        set_seed(args.seed)
        described = load_job(job) if isinstance(job, str) else job or Job(precision="fp32")
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        self.accelerator = Accelerator(
            cpu=bool(args.use_cpu), mixed_precision=precision, job=described, step_scheduler_with_optimizer=False,
            gradient_accumulation_steps=1,
        )  # fmt: skip
        self.label_names: list[str] = find_labels(type(model)) if args.label_names is None else args.label_names
        self.args, self.collator = args, data_collator or default_collator(processing_class)
        if args.remove_unused_columns:
            self.collator = used_columns(model, self.collator, self.label_names)
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.optimizer, self.lr_scheduler = optimizers
        self.state: Any = TrainerState()
        self.state.is_world_process_zero = self.accelerator.is_main_process
        self.state.is_local_process_zero = self.accelerator.is_local_main_process
        self.control: Any = TrainerControl()
        chosen = [DefaultFlowCallback, *(callbacks or [])]
        self.callback_handler: Any = CallbackHandler(chosen, model, processing_class, *optimizers)
        self._counts_items = "num_items_in_batch" in inspect.signature(model.forward).parameters or any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()
        )
        self._shifts_labels = predicts_next_token(model)
        self._divides_by_items: bool | None = None
        """Whether the model divides its loss by num_items_in_batch, once a loss showed it."""
        self._unlogged: list[float] = []  # losses of the steps since the last log
        enable: Any = getattr(model, "gradient_checkpointing_enable", None)
        if args.gradient_checkpointing and enable is not None:
            enable()
        self.model = model
        self._prepared = False
        self._call("on_init_end")

    def _call(self, event: str, **values: Any) -> None:
        """Call the callbacks, which may change what comes next."""
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        self.control = getattr(handler, event)(self.args, self.state, self.control, **values)

    def add_callback(self, callback: Any) -> None:
        """Add a TrainerCallback."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a TrainerCallback."""
        self.callback_handler.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        return self.accelerator.is_main_process

    def is_local_process_zero(self) -> bool:
        return self.accelerator.is_local_main_process

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

        args = self.args
        if self.optimizer is None:
            kind = str(getattr(args.optim, "value", args.optim))
            if not kind.startswith("adamw_torch"):
                raise JobError(f"TrainingArguments.optim={kind} is not supported; adamw_torch, or give optimizers=…")
            self.optimizer = make_optimizer(self.model, args)
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

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Train for the epochs or steps of the arguments, or until a callback stops it."""
        from transformers.trainer_utils import TrainOutput, speed_metrics

        args, state, started = self.args, self.state, time.time()
        if self.train_dataset is None:
            raise JobError("train needs train_dataset=…")
        loader, sampler = self._loader(self.train_dataset, args.per_device_train_batch_size, shuffled=True)
        passes = args.gradient_accumulation_steps
        per_epoch = max(1, -(-len(loader) // passes))
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        self._prepare(steps)
        if resume_from_checkpoint:
            state = self._resume(resume_from_checkpoint)
        state.max_steps, state.num_train_epochs = steps, math.ceil(steps / per_epoch)
        state.compute_steps(args, steps)
        state.eval_steps = state.eval_steps or state.logging_steps
        self.callback_handler.train_dataloader = loader
        total, counted, epoch = 0.0, 0, state.global_step // per_epoch
        skip = state.global_step % per_epoch
        seed = args.data_seed if args.data_seed is not None else args.seed
        self._call("on_train_begin")
        if args.eval_on_start and self.eval_dataset is not None:
            self.evaluate()
        while state.global_step < steps and not self.control.should_training_stop:
            sampler.generator.manual_seed(seed + epoch)
            self.model.train()
            self._call("on_epoch_begin")
            for number, batches in enumerate(groups(loader, passes)):
                if number < skip:
                    continue
                self._call("on_step_begin")
                self._unlogged.append(self._step(batches))
                total, counted = total + self._unlogged[-1], counted + 1
                state.epoch = epoch + (number + 1) / per_epoch
                self._call("on_step_end")
                self._act()
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            self._call("on_epoch_end")
            self._act()
            epoch, skip = epoch + 1, 0
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            assert self.accelerator.training is not None
            self.accelerator.training.load(state.best_model_checkpoint)
        mean = total / max(1, counted)
        speed = speed_metrics("train", started, len(loader.dataset) * state.num_train_epochs, counted)
        metrics = {**speed, "train_loss": mean}
        self.log(metrics)
        self._call("on_train_end")
        return TrainOutput(state.global_step, mean, metrics)

    def _resume(self, given: str | bool) -> Any:
        """Load a checkpoint and the state that was written with it."""
        folder = Path(self.args.output_dir) / "checkpoints" if given is True else Path(str(given))
        self.accelerator.load_state(folder)
        step, file = int(self.lr_scheduler.scheduler.last_epoch), folder / STATE_FILE
        if file.is_file() and (saved := type(self.state).load_from_json(str(file))).global_step == step:
            saved.is_world_process_zero = self.state.is_world_process_zero
            saved.is_local_process_zero = self.state.is_local_process_zero
            self.state = saved
        self.state.global_step = step
        return self.state

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
        if self._counts_items and self._divides_by_items is not False and all("labels" in batch for batch in batches):
            mine = sum(int(self._count_targets(batch)) for batch in batches)
            items = accelerator.reduce(torch.tensor(float(mine), device=accelerator.device))
            items.requires_grad_(self._divides_by_items is None)
        total = torch.zeros((), device=accelerator.device)
        for i, batch in enumerate(batches):
            accelerator.sync_gradients = i == len(batches) - 1
            loss = self.compute_loss(self.model, batch, num_items_in_batch=items)
            if items is not None and self._divides_by_items is None:
                self._divides_by_items = uses(loss, items)
            loss = loss * dp if items is not None and self._divides_by_items else loss / len(batches)
            accelerator.backward(loss)
            total += loss.detach()
            if i < len(batches) - 1:
                self._call("on_substep_end")
        if args.max_grad_norm:
            accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
        self._call("on_pre_optimizer_step")
        self.optimizer.step()
        self._call("on_optimizer_step")
        if not self.optimizer.step_was_skipped:
            self.lr_scheduler.scheduler.step()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        return float(accelerator.reduce(total, "mean"))

    def _act(self) -> None:
        """Log, evaluate and save where a callback asks for it."""
        if self.control.should_log and self._unlogged:
            rate = self.optimizer.param_groups[0]["lr"]
            self.log({"loss": sum(self._unlogged) / len(self._unlogged), "learning_rate": rate})
            self._unlogged.clear()
        if self.control.should_evaluate and self.eval_dataset is not None:
            best = self._improved(self.evaluate())
            self.model.train()
            if str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) == "best":
                self.control.should_save = best
        if self.control.should_save:
            self._save(Path(self.args.output_dir) / "checkpoints")
            self._call("on_save")
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False

    def _save(self, folder: Path) -> None:
        self.accelerator.save_iteration = self.state.global_step
        self.accelerator.save_state(folder)
        if self.accelerator.is_main_process:
            self.state.save_to_json(str(folder / STATE_FILE))
        self.accelerator.wait_for_everyone()

    def _improved(self, metrics: dict[str, Any]) -> bool:
        """Whether metric_for_best_model is the best so far; the model is then kept if it is loaded at the end."""
        args, state = self.args, self.state
        if args.metric_for_best_model is None:
            return False
        name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
        if name not in metrics:
            raise JobError(f"metric_for_best_model={name} is not among the metrics: {', '.join(metrics)}")
        sign = 1 if args.greater_is_better else -1
        if state.best_metric is not None and sign * metrics[name] <= sign * state.best_metric:
            return False
        state.best_metric, state.best_global_step = metrics[name], state.global_step
        if args.load_best_model_at_end:
            state.best_model_checkpoint = str(Path(args.output_dir) / "best")
            self._save(Path(state.best_model_checkpoint))
        return True

    def log(self, values: dict[str, float]) -> None:
        """Add values to state.log_history, and print them."""
        record = {**values, "epoch": round(self.state.epoch or 0.0, 4), "step": self.state.global_step}
        self.state.log_history.append(record)
        if not self.args.disable_tqdm:
            self.accelerator.print(json.dumps(record))
        self._call("on_log", logs=record)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        """The loss that the model returns. A subclass may compute another."""
        counted = self._counts_items and num_items_in_batch is not None
        outputs = model(**inputs, **({"num_items_in_batch": num_items_in_batch} if counted else {}))
        if isinstance(outputs, dict) and "loss" not in outputs:
            raise JobError(f"the model returned no loss, but {', '.join(outputs)}; its inputs were {', '.join(inputs)}")
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss, outputs and labels of a batch, in evaluation. A subclass may compute others."""

        def loss_of(batch: Any) -> tuple[Tensor, Any]:
            counted = self._counts_items and "labels" in batch
            items = self._count_targets(batch) if counted else None  # as transformers divides the loss
            found: tuple[Tensor, Any] = self.compute_loss(model, batch, True, num_items_in_batch=items)
            return found

        return predicted(model, inputs, self.label_names, loss_of, prediction_loss_only, ignore_keys)

    def get_train_dataloader(self) -> Any:
        """This rank's batches of the training data."""
        return self._loader(self.train_dataset, self.args.per_device_train_batch_size, shuffled=True)[0]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """This rank's batches of the evaluation data, or of one of its datasets by name."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise JobError("evaluate needs eval_dataset=…")
        return self._loader(dataset, self.args.per_device_eval_batch_size, shuffled=False)[0]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """This rank's batches of other data."""
        return self.get_eval_dataloader(test_dataset)

    def num_examples(self, dataloader: Any) -> int:
        return len(dataloader.dataset)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """One pass over a loader: predictions, labels, metrics and the number of samples, as EvalLoopOutput."""
        from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

        self._prepare(0)
        self.callback_handler.eval_dataloader = dataloader
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        found = evaluate_batches(
            self.accelerator, dataloader,
            lambda batch: self.prediction_step(self.model, batch, loss_only, ignore_keys),
            loss_only, self.preprocess_logits_for_metrics, self.args.eval_do_concat_batches,
        )  # fmt: skip
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and found.predictions is not None and found.labels is not None:
            metrics = denumpify_detensorize(self.compute_metrics(EvalPrediction(found.predictions, found.labels)))
        prefix = metric_key_prefix
        named = {name if name.startswith(prefix) else f"{prefix}_{name}": value for name, value in metrics.items()}
        loss = {} if found.loss is None else {f"{prefix}_loss": found.loss}
        return EvalLoopOutput(found.predictions, found.labels, {**loss, **named}, found.samples)

    def _evaluated(self, dataset: Any, prefix: str, loss_only: bool | None, ignore_keys: Any) -> Any:
        from transformers.trainer_utils import speed_metrics

        self._prepare(0)
        loader, started = self.get_eval_dataloader(dataset), time.time()
        found = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, prefix)
        found.metrics.update(speed_metrics(prefix, started, found.num_samples, len(loader)))
        return found

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """The mean loss over the batches of the evaluation data, and what compute_metrics makes of the predictions. Of
        several datasets, by name, those of each."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(dataset, dict):
            parts = {k: self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{k}") for k, part in dataset.items()}
            return {name: value for metrics in parts.values() for name, value in metrics.items()}
        found = self._evaluated(dataset, metric_key_prefix, True if self.compute_metrics is None else None, ignore_keys)
        metrics: dict[str, Any] = found.metrics
        self.log(metrics)
        self._call("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Predictions, labels and metrics of a dataset, as PredictionOutput of transformers."""
        from transformers.trainer_utils import PredictionOutput

        found = self._evaluated(test_dataset, metric_key_prefix, False, ignore_keys)
        self._call("on_predict", metrics=found.metrics)
        return PredictionOutput(found.predictions, found.label_ids, found.metrics)

    def create_model_card(self, **facts: Any) -> None:
        """Write OUTPUT_DIR/README.md as transformers does."""
        from transformers import Trainer

        Trainer.create_model_card(self, **facts)

    def push_to_hub(self, *args: Any, **options: Any) -> None:
        """Refused: nothing is uploaded."""
        raise JobError("push_to_hub is not supported; upload OUTPUT_DIR with `hf upload` after save_model")

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics as transformers does."""
        from transformers.trainer_pt_utils import log_metrics

        log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to OUTPUT_DIR/SPLIT_results.json."""
        from transformers.trainer_pt_utils import save_metrics

        save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write the state to OUTPUT_DIR/trainer_state.json."""
        if self.accelerator.is_main_process:
            self.state.save_to_json(str(Path(self.args.output_dir) / STATE_FILE))

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model as transformers reads it. Call it on every rank."""
        folder, weights = output_dir or self.args.output_dir, self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            model: Any = self.model
            model.save_pretrained(folder, state_dict=weights)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        self.accelerator.wait_for_everyone()
