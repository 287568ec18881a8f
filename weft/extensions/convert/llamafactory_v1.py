"""LLaMA-Factory v1's YAML: sections for adapters, distribution, optimizer and schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.extensions.convert import training_arguments
from weft.extensions.convert.accelerate import has_keys, read
from weft.extensions.convert.conversion import SourceFormat
from weft.extensions.convert.llamafactory import DATA, LORA, PREFERENCES
from weft.extensions.convert.settings import (
    KEEP_ALL,
    Result,
    Rule,
    Settings,
    absent,
    as_number,
    choice,
    is_off,
    keep_newest,
    switch,
    to,
    unneeded,
)

SERVING = absent("serving is not in Weft; weft export RUN --to hf opens in vLLM")
PLUGIN = absent("no such setting of a plugin in Weft")


def _micro_batch(value: Any, settings: Settings) -> Result:
    """v1 accumulates only where `global_batch_size` asks for it."""
    micro = as_number(value)
    if micro is None or settings.number("global_batch_size", default=0):
        return to("train.microbatch")(value, settings)
    ranks = max(1, (settings.ranks or 1) // int(max(1, settings.number("cp_size"))))
    return Result(
        {"train.microbatch": micro, "train.global_batch": int(micro * ranks)}, f"{micro} a device × {ranks} replicas"
    )


def _of_lora(job_field: str) -> Rule:
    """A parameter of adapters, where the method is LoRA; `all` targets are Weft's default."""

    def rule(value: Any, settings: Settings) -> Result:
        if settings.get("peft_config.name") != "lora":
            return Result(note="peft_config.name is not lora", status="not needed")
        if value == "all":
            return Result(note="every matrix of the blocks, as in Weft", status="not needed")
        return to(job_field)(value, settings)

    return rule


def _method(value: Any, settings: Settings) -> Result:
    return training_arguments.adapters("r")(value, settings.section("peft_config."))


TABLE: dict[str, Rule] = {
    "model": to("model.pretrained", str),
    "model_class": choice({"llm": {}, "cls": "model.family=bert classifies", "other": "write the model's fields"}),
    "custom_chat_template": absent("write it to a .jinja file and set data.template to its path"),
    "trust_remote_code": absent("Weft never runs code of a checkpoint"),
    "flash_attn": unneeded("the fastest attention of torch is chosen"),
    "init_config*": unneeded("each rank reads its own shard of the weights"),
    "kernel_config*": unneeded("Weft has fused kernels of its own"),
    "quant_config*": absent("weights are not quantized in training"),
    "peft_config.name": _method,
    "peft_config.r": _of_lora("model.lora.rank"),
    "peft_config.lora_alpha": _of_lora("model.lora.alpha"),
    "peft_config.lora_dropout": _of_lora("model.lora.dropout"),
    "peft_config.target_modules": _of_lora("model.lora.targets"),
    "peft_config.*": LORA,
    "dist_config.name": choice({
        "fsdp2": {"parallel.dp_shard": -1, "parallel.zero": 3}, "deepspeed": {"parallel.dp_shard": -1},
        "ddp": {"parallel.dp_replicate": -1, "parallel.dp_shard": 1},
    }),
    "dist_config.dcp_path": absent("model: hf:PATH starts from published weights"),
    "dist_config.config_file": absent("convert that file too: weft convert FILE"),
    "dist_config.mixed_precision": choice({"bf16": {"precision": "bf16"}, "fp32": {"precision": "fp32"}}),
    "dist_config.reshard_after_forward": switch({"parallel.zero": 3}, {"parallel.zero": 2}),
    "dist_config.offload_params": switch({"memory.offload": "states"}),
    "dist_config.*": PLUGIN,
    "optim_config.name": choice({
        "muon": {"optim.name": "muon"}, "adamw": {"optim.name": "adamw"}, "sgd": {"optim.name": "sgd"},
    }),
    "optim_config.wd": to("optim.weight_decay"),
    "optim_config.weight_decay": to("optim.weight_decay"),
    "optim_config.momentum": to("optim.momentum"),
    "optim_config.betas": to("optim.betas"),
    "optim_config.adamw_betas": to("optim.betas"),
    "optim_config.eps": to("optim.eps"),
    "optim_config.adamw_eps": to("optim.eps"),
    "optim_config.*": PLUGIN,
    "lr_scheduler_config.name": choice(training_arguments.SCHEDULES),
    "lr_scheduler_config.warmup_steps": to("optim.warmup"),
    "lr_scheduler_config.num_warmup_steps": to("optim.warmup"),
    "lr_scheduler_config.warmup_ratio": to("optim.warmup"),
    "lr_scheduler_config.*": PLUGIN,
    "output_dir": unneeded("files are in runs/NAME; runs_dir changes the folder"),
    "micro_batch_size": _micro_batch,
    "global_batch_size": to("train.global_batch"),
    "cutoff_len": to("data.seq_len"),
    "learning_rate": to("optim.lr"),
    "num_train_epochs": training_arguments.epochs("max_steps"),
    "max_steps": training_arguments.steps_of,
    "max_grad_norm": to("optim.clip"),
    "bf16": switch({"precision": "bf16"}, {"precision": "fp32"}),
    "batching_strategy": choice({
        "normal": {"data.packing": False}, "padding_free": {"data.packing": True},
        "dynamic_batching": "batches count sequences", "dynamic_padding_free": "batches count sequences",
    }),
    "batching_workers": training_arguments.DATA_LOADER,
    "enable_activation_checkpointing": switch({"memory.recompute": "full"}, {"memory.recompute": "none"}),
    "dp_size": unneeded("replicas are the ranks that cp leaves"),
    "cp_size": to("parallel.cp"),
    "cp_mode": choice({"ulysses": {"parallel.cp_style": "ulysses"}, "ring": {"parallel.cp_style": "ring"}}),
    "mp_replicate_size": to("parallel.dp_replicate"),
    "mp_shard_size": to("parallel.dp_shard"),
    "dist_timeout": to("comm.timeout_s"),
    "seed": to("train.seed"),
    "full_determinism": unneeded("the samples of a run depend on the seed alone"),
    "resume_from_checkpoint": unneeded("a run that is started again resumes by itself"),
    "save_steps": training_arguments.interval("checkpoint.every", "save_strategy"),
    "save_epochs": absent("checkpoint.every counts steps"),
    "save_ckpt_as_hf": absent("weft export RUN --to hf writes weights of any checkpoint"),
    "save_total_limit": keep_newest,
    "logging_steps": to("watch.every"),
    "train_dataset": DATA,
    "eval_dataset": DATA,
    "pref_*": PREFERENCES,
    "dpo_*": PREFERENCES,
    "simpo_*": PREFERENCES,
    "ld_alpha": PREFERENCES,
    "sample_backend": SERVING,
    "max_new_tokens": SERVING,
}  # fmt: skip


def detect(text: str, path: Path) -> bool:
    sections = ("model_class", "train_dataset", "dist_config", "peft_config", "kernel_config")
    return has_keys(text, "model") and has_keys(text, *sections) and not has_keys(text, "base_model")


def _defaults(settings: Settings) -> dict[str, tuple[Any, str]]:
    said = "the default of LLaMA-Factory v1"
    found: dict[str, tuple[Any, str]] = {
        "data.format": ("chat", "v1 trains on conversations"), "data.answers_only": (True, said),
        "data.seq_len": (2048, said), "optim.lr": (1e-4, said), "optim.clip": (1.0, said),
        "optim.name": ("adamw", said), "optim.betas": ([0.9, 0.999], "the default of torch.optim.AdamW"),
        "optim.weight_decay": (0.01, "the default of torch.optim.AdamW"), "train.seed": (42, said),
        "optim.schedule": ("constant", "no lr_scheduler_config"), "optim.warmup": (0, "no lr_scheduler_config"),
        "memory.recompute": ("full", "enable_activation_checkpointing is on"), "comm.timeout_s": (18000, said),
        "precision": ("bf16", said), "train.eval_every": (0, "v1 evaluates after training"),
        "checkpoint.every": (0, "save_steps is not given"),
        "checkpoint.keep": (KEEP_ALL, "save_total_limit is not given: every checkpoint is kept"),
        "watch.every": (1, said), "data.packing": (False, "batching_strategy is normal"),
    }  # fmt: skip
    if "micro_batch_size" not in settings:
        found |= {name: (value, said) for name, value in _micro_batch(1, settings).job.items()}
    if is_off(settings.get("max_steps")) and is_off(settings.get("num_train_epochs")):
        found["train.epochs"] = (3, said)
    if settings.get("peft_config.name") == "lora":
        found |= {"model.lora.rank": (8, said), "model.lora.alpha": (16, said), "model.lora.dropout": (0.05, said)}
    return found


LLAMAFACTORY_V1 = SourceFormat(
    "llamafactory-v1", "a LLaMA-Factory v1 config", read, detect, TABLE,
    defaults=_defaults,
    missing={
        "model": "no model; add model=hf:PATH",
        "data.source": "add data.source=PATH, a file of data.format or a token store made by weft data build",
    },
)  # fmt: skip
