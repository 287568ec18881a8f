"""Which fields of TrainingArguments WeftTrainer uses, which it refuses, and the optimizer that they describe."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.extensions.convert.settings import Settings, find_rule, flatten
from weft.extensions.convert.training_arguments import TABLE
from weft.job.errors import JobError

HANDLED = (
    "adam_*", "bf16", "data_seed", "dataloader_drop_last", "disable_tqdm", "eval_delay", "eval_do_concat_batches",
    "eval_on_start", "eval_steps", "eval_strategy", "fp16", "generation_*", "gradient_accumulation_steps",
    "gradient_checkpointing", "greater_is_better", "label_names", "learning_rate", "load_best_model_at_end",
    "logging_first_step", "logging_steps", "logging_strategy", "lr_scheduler_kwargs*", "lr_scheduler_type",
    "max_grad_norm", "max_steps", "metric_for_best_model", "num_train_epochs", "optim", "output_dir",
    "per_device_eval_batch_size", "per_device_train_batch_size", "predict_with_generate", "prediction_loss_only",
    "remove_unused_columns", "save_steps", "save_strategy", "seed", "use_cpu", "warmup_*", "weight_decay",
)  # fmt: skip
"""Fields that WeftTrainer uses, whatever a job can hold."""
WITHOUT_EFFECT = ("ddp_timeout", "do_predict", "log_level*", "no_cuda", "optim_args", "run_name", "save_total_limit")
"""Fields that change no result and may be set."""


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


def make_optimizer(model: nn.Module, args: Any) -> torch.optim.AdamW:
    """AdamW without decay of biases and norms."""
    from transformers.trainer_pt_utils import get_parameter_names

    names = get_parameter_names(model, [nn.LayerNorm], ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)"])
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if n in names], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if n not in names], "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
