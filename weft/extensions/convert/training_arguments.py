"""The fields of Hugging Face's TrainingArguments, which LLaMA-Factory's YAML has too, and `WeftTrainer` takes."""

from __future__ import annotations

import re
from typing import Any

from weft.extensions.convert.settings import (
    KEEP_ALL,
    Result,
    Rule,
    Settings,
    absent,
    accumulation,
    as_number,
    choice,
    device_batch,
    is_off,
    keep_newest,
    partly,
    switch,
    to,
    unneeded,
)

OPTIMIZERS: dict[str, dict[str, Any] | str] = {
    **{
        name: {"optim.name": "adamw"}
        for name in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_anyprecision")
    },
    **{
        name: {"optim.name": "adamw", "memory.states": "8bit"}
        for name in ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit")
    },
    "paged_adamw_32bit": {"optim.name": "adamw", "memory.offload": "auto"},
    "paged_adamw_8bit": {"optim.name": "adamw", "memory.offload": "auto", "memory.states": "8bit"},
    "sgd": {"optim.name": "sgd"},
    "adafactor": {"optim.name": "adafactor"},
    "muon": {"optim.name": "muon"},
}
SCHEDULES: dict[str, dict[str, Any] | str] = {
    "linear": {"optim.schedule": "linear", "optim.min_lr": 0.0},
    "cosine": {"optim.schedule": "cosine", "optim.min_lr": 0.0},
    "cosine_with_min_lr": {"optim.schedule": "cosine"},
    "constant": {"optim.schedule": "constant", "optim.warmup": 0},
    "constant_with_warmup": {"optim.schedule": "constant"},
    "warmup_stable_decay": {"optim.schedule": "wsd", "optim.min_lr": 0.0},
    "polynomial": {"optim.schedule": "linear", "optim.min_lr": 0.0},
    "inverse_sqrt": "Weft has constant, linear, cosine and wsd",
    "reduce_lr_on_plateau": "Weft has constant, linear, cosine and wsd",
    "cosine_with_restarts": "Weft has constant, linear, cosine and wsd",
}
LORA_RANK = 8
"""The rank of adapters where a config does not give it."""
DATA_LOADER = unneeded("Weft's loader reads ahead (data.prefetch) and keeps the order at any number of ranks")
TRACKERS: dict[str, list[str]] = {name: [name] for name in ("tensorboard", "wandb", "mlflow", "trackio")}


def trackers(value: Any, settings: Settings) -> Result:
    """`report_to`: a tracker or a list of them."""
    names = [value] if isinstance(value, str) else list(value or ())
    known = [name for name in names if name in TRACKERS]
    others = [name for name in names if name not in TRACKERS and not is_off(name)]
    if not known:
        return absent(f"trackers are {', '.join(TRACKERS)}")(others, settings)
    note = f"no counterpart of {', '.join(others)}" if others else ""
    return Result({"watch.trackers": known}, note, "partly" if others else "mapped")


def steps_of(value: Any, settings: Settings) -> Result:
    """`max_steps`, where -1 leaves the length to the epochs."""
    steps = as_number(value)
    if steps is None or steps <= 0:
        return Result(note="the epochs decide", status="not needed")
    return Result({"train.steps": steps})


def epochs(key: str) -> Rule:
    """Epochs, where no number of steps is given."""

    def rule(value: Any, settings: Settings) -> Result:
        if settings.number(key, default=0) > 0:
            return Result(note=f"{key} decides", status="not needed")
        return to("train.epochs")(value, settings)

    return rule


def interval(job_field: str, strategy: str) -> Rule:
    """Steps between two events, where the strategy is `steps`; below 1 a fraction of all steps."""

    def rule(value: Any, settings: Settings) -> Result:
        every = as_number(value)
        if every is None:
            return Result(note="empty", status="not needed")
        if str(settings.get(strategy, "steps")) in ("no", "epoch"):
            return Result(note=f"{strategy} is {settings[strategy]}", status="not needed")
        if every < 1:
            total = settings.number("max_steps", default=0)
            if total <= 0:
                return Result(note=f"a fraction of all steps, which are not known; set {job_field}",
                              status="no counterpart")  # fmt: skip
            every = max(1, round(every * total))
        return Result({job_field: int(every)})

    return rule


def _strategy(job_field: str) -> Rule:
    return choice({"steps": {}, "no": {job_field: 0}, "false": {job_field: 0}, "none": {job_field: 0},
                   "epoch": {job_field: "epoch"}})  # fmt: skip


def _beta(position: int) -> Rule:
    def rule(value: Any, settings: Settings) -> Result:
        betas = [settings.number("adam_beta1", default=0.9), settings.number("adam_beta2", default=0.999)]
        betas[position] = as_number(value) or 0.0
        return Result({"optim.betas": betas})

    return rule


def _warmup_ratio(value: Any, settings: Settings) -> Result:
    if settings.number("warmup_steps", default=0) > 0:
        return Result(note="warmup_steps decides", status="not needed")
    return to("optim.warmup")(value, settings)


def _warmup_steps(value: Any, settings: Settings) -> Result:
    if settings.number("warmup_ratio", default=0) > 0 and not as_number(value):
        return Result(note="warmup_ratio decides", status="not needed")
    return to("optim.warmup")(value, settings)


def adapters(rank: str) -> Rule:
    """The method of fine-tuning: all weights, or adapters of a rank that another setting gives."""

    def rule(value: Any, settings: Settings) -> Result:
        if value in ("lora", "qlora"):
            note = "weights are not quantized in training" if value == "qlora" else ""
            return Result(
                {"model.lora.rank": settings.number(rank, default=LORA_RANK)}, note, "partly" if note else "mapped"
            )
        return choice({"full": {}, "none": {}, "freeze": "model.frozen is for modules of your own",
                       "oft": "adapters are LoRA", "llama-adapter": "adapters are LoRA"})(value, settings)  # fmt: skip

    return rule


def lora_table(rank: str, targets: str, method: str, default: str = "none") -> dict[str, Rule]:
    """The settings of adapters; they apply where the method, or its default, is LoRA."""

    def only_lora(rule: Rule) -> Rule:
        return lambda value, settings: (
            rule(value, settings)
            if settings.get(method, default) in ("lora", "qlora")
            else Result(note=f"{method} is not lora", status="not needed")
        )

    fields = {rank: "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
    table = {key: to(f"model.lora.{name}") for key, name in fields.items()} | {targets: _lora_targets}
    return {key: only_lora(rule) for key, rule in table.items()}


def _lora_targets(value: Any, settings: Settings) -> Result:
    """Names of layers, perhaps with the module above; PEFT reads a string with other characters as a pattern."""
    if isinstance(value, str) and re.search(r"[^\w, -]", value):
        return Result(note="a pattern; name the layers, such as [q_proj, v_proj]", status="no counterpart")
    if isinstance(value, list):
        value = [re.sub(r"^(self_attn|mlp)\.", "", str(name)) for name in value]
    return to("model.lora.targets")(value, settings)


def shared_table(micro_batch: str = "per_device_train_batch_size") -> dict[str, Rule]:
    """The rules of fields with the same names in TrainingArguments, LLaMA-Factory and axolotl."""
    return {
        micro_batch: device_batch("gradient_accumulation_steps"),
        "gradient_accumulation_steps": accumulation("train.microbatch"),
        "learning_rate": to("optim.lr"),
        "weight_decay": to("optim.weight_decay"),
        "adam_beta1": _beta(0),
        "adam_beta2": _beta(1),
        "adam_epsilon": to("optim.eps"),
        "max_grad_norm": to("optim.clip"),
        "max_steps": steps_of,
        "warmup_ratio": _warmup_ratio,
        "warmup_steps": _warmup_steps,
        "logging_steps": interval("watch.every", "logging_strategy"),
        "save_steps": interval("checkpoint.every", "save_strategy"),
        "eval_steps": interval("train.eval_every", "eval_strategy"),
        "save_strategy": _strategy("checkpoint.every"),
        "eval_strategy": _strategy("train.eval_every"),
        "evaluation_strategy": _strategy("train.eval_every"),
        "save_total_limit": keep_newest,
        "seed": to("train.seed"),
        "bf16": switch({"precision": "bf16"}),
        "fp16": switch({"precision": "fp16"}),
        "tf32": unneeded("matrix products of fp32 stay fp32; precision: bf16 uses tensor cores"),
        "gradient_checkpointing": switch({"memory.recompute": "full"}, {"memory.recompute": "none"}),
        "gradient_checkpointing_kwargs.*": unneeded("Weft recomputes whole blocks, without reentry"),
        "torch_compile": switch({"train.compile": True}),
        "torch_compile_*": absent("Weft compiles each block with inductor"),
        "ddp_timeout": to("comm.timeout_s"),
        "ddp_bucket_cap_mb": to("comm.bucket_mb"),
        "ddp_find_unused_parameters": unneeded("parameters without a gradient are not updated"),
        "ddp_*": unneeded("Weft's own data parallelism"),
        "label_smoothing_factor": to("train.label_smoothing"),
        "dataloader_*": DATA_LOADER,
        "group_by_length": absent("sequences have one length; documents are packed"),
        "length_column_name": absent("sequences have one length; documents are packed"),
        "remove_unused_columns": unneeded("only the text or the tokens are read"),
        "include_tokens_per_second": unneeded("metrics have tokens_per_s"),
        "include_num_input_tokens_seen": unneeded("metrics have tokens"),
        "report_to": trackers,
        "run_name": to("name", lambda name: "".join(c if c.isalnum() or c in "._-" else "-" for c in str(name))),
        "resume_from_checkpoint": unneeded("a run that is started again resumes by itself"),
        "save_safetensors": unneeded("checkpoints hold safetensors"),
        "save_only_model": absent("a checkpoint also holds the optimizer, so that a run can be continued"),
        "save_on_each_node": unneeded("checkpoints are written in parallel to one folder"),
        "push_to_hub": absent("weft export RUN --to hf writes a folder that the hub takes"),
        "hub_*": absent("weft export RUN --to hf writes a folder that the hub takes"),
        "neftune_noise_alpha": absent("no noise is added to embeddings"),
        "use_liger_kernel": unneeded("Weft has fused kernels of its own"),
        "auto_find_batch_size": unneeded("train.microbatch: auto is the largest that fits"),
        "fsdp": partly(
            switch({"parallel.dp_shard": -1, "parallel.zero": 3}), "see fsdp_config for the sharding strategy"
        ),
        "fsdp_transformer_layer_cls_to_wrap": unneeded("blocks are found by Weft"),
    }  # fmt: skip


TABLE: dict[str, Rule] = {
    **shared_table(),
    "optim": choice(OPTIMIZERS),
    "optim_args": absent("see optim.betas, optim.eps and optim.momentum"),
    "optim_target_modules": absent("muon takes the matrices of the blocks, and adamw the rest"),
    "lr_scheduler_type": choice(SCHEDULES),
    "lr_scheduler_kwargs.min_lr_rate": to("optim.min_lr"),
    "lr_scheduler_kwargs.min_lr_ratio": to("optim.min_lr"),
    "lr_scheduler_kwargs.*": absent("the schedule has no such parameter in Weft"),
    "num_train_epochs": epochs("max_steps"),
    "per_device_eval_batch_size": unneeded("evaluation uses train.microbatch"),
    "output_dir": unneeded("files are in runs/NAME; runs_dir changes the folder"),
    "overwrite_output_dir": unneeded("a run that is started again resumes by itself"),
    "do_train": unneeded("weft train JOB"),
    "do_eval": unneeded("train.eval_every decides"),
    "do_predict": absent("weft generate RUN writes texts"),
    "eval_accumulation_steps": unneeded("evaluation keeps only sums"),
    "eval_delay": absent("evaluation starts at the first multiple of train.eval_every"),
    "eval_on_start": absent("evaluation starts at the first multiple of train.eval_every"),
    "metric_for_best_model": absent("checkpoint.keep keeps the newest"),
    "greater_is_better": absent("checkpoint.keep keeps the newest"),
    "load_best_model_at_end": absent("checkpoint.keep keeps the newest"),
    "logging_strategy": choice(
        {"steps": {}, "no": "watch.every lines are always printed", "epoch": "counted in steps; set watch.every"}
    ),
    "logging_dir": unneeded("files are in runs/NAME"),
    "logging_first_step": unneeded("the first step is always logged"),
    "logging_nan_inf_filter": unneeded("non-finite steps are skipped and reported (resilience.bad_steps)"),
    "log_level*": unneeded("rank 0 logs to the terminal, every rank to RUN/logs"),
    "log_on_each_node": unneeded("rank 0 logs to the terminal, every rank to RUN/logs"),
    "disable_tqdm": unneeded("progress is one line every watch.every steps"),
    "data_seed": absent("train.seed also decides the order of samples"),
    "full_determinism": unneeded("the samples of a run depend on the seed alone"),
    "use_cpu": switch({"cluster.device": "cpu"}),
    "no_cuda": switch({"cluster.device": "cpu"}),
    "bf16_full_eval": unneeded("evaluation has the precision of training"),
    "fp16_full_eval": unneeded("evaluation has the precision of training"),
    "fp16_opt_level": absent("Apex is not used"),
    "half_precision_backend": unneeded("torch's own"),
    "skip_memory_metrics": unneeded("metrics have peak_memory_gib"),
    "average_tokens_across_devices": unneeded("the loss is a mean over all valid tokens of the global batch"),
    "restore_callback_states_from_checkpoint": absent("callbacks are not part of a job"),
    "ignore_data_skip": unneeded("a run continues with the next sample"),
    "past_index": absent("no model with memory between batches"),
    "prediction_loss_only": unneeded("evaluation keeps only the loss"),
    "torch_empty_cache_steps": unneeded("Weft predicts memory and reports out of memory with its cause"),
    "accelerator_config*": unneeded("there is no Accelerate below"),
    "parallelism_config*": absent("set parallel: {dp_shard, tp, cp, …}"),
    "eval_use_gather_object": unneeded("evaluation keeps only sums"),
    "debug": absent("weft diagnose RUN names causes of faults"),
    "local_rank": unneeded("the launcher sets it"),
    "deepspeed": absent("weft convert DEEPSPEED-FILE converts it"),
    "fsdp_min_num_params": unneeded("blocks are found by Weft"),
    "include_for_metrics": absent("evaluation keeps only the loss"),
    "include_inputs_for_metrics": absent("evaluation keeps only the loss"),
    "batch_eval_metrics": absent("evaluation keeps only the loss"),
    "liger_kernel_config*": unneeded("Weft has fused kernels of its own"),
    "jit_mode_eval": absent("TorchScript is not used"),
    "mp_parameters": absent("SageMaker is not supported"),
    "project": unneeded("the tracker's own environment variables name it"),
    "trackio_space_id": unneeded("the tracker's own environment variables name it"),
}

DEFAULTS: dict[str, tuple[Any, str]] = {
    "precision": ("fp32", "neither bf16 nor fp16 is on"),
    "optim.lr": (5e-5, "the default of TrainingArguments"),
    "optim.betas": ([0.9, 0.999], "the default of TrainingArguments"),
    "optim.weight_decay": (0.0, "the default of TrainingArguments"),
    "optim.schedule": ("linear", "the default of TrainingArguments"),
    "optim.min_lr": (0.0, "the schedules of transformers end at 0"),
    "optim.warmup": (0, "the default of TrainingArguments"),
    "train.seed": (42, "the default of TrainingArguments"),
    "train.eval_every": (0, "evaluation is off by default"),
    "checkpoint.every": (500, "the default of TrainingArguments"),
    "checkpoint.keep": (KEEP_ALL, "save_total_limit is not given: every checkpoint is kept"),
    "optim.clip": (1.0, "the default of TrainingArguments"),
    "watch.every": (500, "the default of TrainingArguments"),
    "comm.timeout_s": (1800, "the default of TrainingArguments"),
}


def defaults(
    settings: Settings, batch_key: str, batch: int, epochs_key: str, epochs: int
) -> dict[str, tuple[Any, str]]:
    """The defaults, with the batch and the length of a run that gives none."""
    found, said = dict(DEFAULTS), "the default of {}"
    if as_number(settings.get(batch_key)) is None:
        fields = device_batch("gradient_accumulation_steps")(batch, settings).job
        found |= {name: (value, said.format(batch_key)) for name, value in fields.items()}
    if "sgd" in (settings.get("optim"), settings.get("optimizer")):
        found["optim.momentum"] = (0.0, "the default of torch.optim.SGD")
    if settings.number("max_steps", default=0) <= 0:
        found["train.epochs"] = (epochs, said.format(epochs_key))
    return found
