"""axolotl's YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.extensions.convert import fine_tuning_data, training_arguments
from weft.extensions.convert.accelerate import FSDP_TABLE, has_keys, read
from weft.extensions.convert.conversion import SourceFormat
from weft.extensions.convert.settings import (
    Result,
    Rule,
    Settings,
    absent,
    as_number,
    choice,
    device_batch,
    is_off,
    partly,
    switch,
    to,
    unneeded,
    with_prefix,
)

DATA = absent("set data.source to the dataset's files and data.format to what they hold")
LORA = absent("adapters have rank, alpha, dropout and targets (model.lora)")
KERNELS = unneeded("Weft has fused kernels of its own")


def _per_epoch(job_field: str) -> Rule:
    """Once in an epoch; other numbers have no counterpart."""

    def rule(value: Any, settings: Settings) -> Result:
        if as_number(value) == 1:
            return Result({job_field: "epoch"})
        return absent(f"{job_field} counts steps, or is epoch for one per epoch")(value, settings)

    return rule


def _bf16(value: Any, settings: Settings) -> Result:
    if str(value).lower() == "auto":
        return Result({"precision": "auto"}, "bf16 on GPUs")
    return switch({"precision": "bf16"})(value, settings)


def _recompute(value: Any, settings: Settings) -> Result:
    if value == "offload":
        return Result({"memory.offload": "activations"})
    return switch({"memory.recompute": "full"}, {"memory.recompute": "none"})(value, settings)


def _wandb(value: Any, settings: Settings) -> Result:
    if is_off(value):
        return Result(note="empty", status="not needed")
    return Result({"watch.trackers": ["wandb"]}, "WANDB_PROJECT names the project")


def _mlflow(value: Any, settings: Settings) -> Result:
    if is_off(value):
        return Result(note="empty", status="not needed")
    return Result({"watch.trackers": ["mlflow"]}, "MLFLOW_TRACKING_URI names the server")


TABLE: dict[str, Rule] = {
    **training_arguments.shared_table("micro_batch_size"),
    "micro_batch_size": device_batch(
        "gradient_accumulation_steps", "tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"
    ),
    "batch_size": to("train.global_batch"),
    "base_model": to("model.pretrained", str),
    "base_model_config": unneeded("the config beside the weights is read"),
    "model_type": unneeded("the checkpoint's config names the model"),
    "tokenizer_type": unneeded("tokenizer.json is used"),
    "tokenizer_config": absent("set data.tokenizer to a tokenizer.json"),
    "tokenizer_use_fast": unneeded("tokenizer.json is used"),
    "is_*_derived_model": unneeded("the checkpoint's config names the model"),
    "trust_remote_code": absent("Weft never runs code of a checkpoint"),
    "hub_model_id": absent("weft export RUN --to hf writes a folder that the hub takes"),
    "load_in_8bit": absent("weights are not quantized in training"),
    "load_in_4bit": absent("weights are not quantized in training"),
    "strict": unneeded("a job never has keys that Weft does not know"),
    **fine_tuning_data.AXOLOTL,
    "test_datasets*": DATA,
    "pretraining_dataset*": DATA,
    "dataset_*": DATA,
    "shuffle_*": unneeded("the order of samples depends on train.seed"),
    "special_tokens*": absent("the tokens are those of the tokenizer"),
    "tokens": absent("the tokens are those of the tokenizer"),
    "val_set_size": to("data.val_fraction"),
    "output_dir": unneeded("files are in runs/NAME; runs_dir changes the folder"),
    "adapter": training_arguments.adapters("lora_r"),
    **training_arguments.lora_table("lora_r", "lora_target_modules", "adapter"),
    "lora_target_linear": unneeded("adapters are on all linear layers by default"),
    "lora_*": LORA,
    "peft*": LORA,
    "qlora_*": LORA,
    "relora*": LORA,
    "loraplus_*": LORA,
    "unfrozen_parameters": absent("model.frozen is for modules of your own"),
    "sequence_len": to("data.seq_len"),
    "sample_packing_*": unneeded("documents are packed"),
    "eval_sample_packing": unneeded("evaluation reads the same windows"),
    "eval_sequence_len": absent("evaluation has the sequence length of training"),
    "pad_to_sequence_len": unneeded("sequences are full"),
    "num_epochs": training_arguments.epochs("max_steps"),
    "optimizer": choice(training_arguments.OPTIMIZERS),
    "optim_args*": absent("see optim.betas, optim.eps and optim.momentum"),
    "lr_scheduler": choice(
        {
            **training_arguments.SCHEDULES,
            "one_cycle": "Weft has constant, linear, cosine and wsd",
            "rex": "Weft has constant, linear, cosine and wsd",
        }
    ),
    "lr_scheduler_kwargs*": absent("the schedule has no such parameter in Weft"),
    "cosine_min_lr_ratio": to("optim.min_lr"),
    "cosine_constant_lr_ratio": absent("optim.schedule=wsd keeps the rate constant before it decays"),
    "bf16": _bf16,
    "bfloat16": partly(switch({"precision": "bf16"}), "master weights and states stay fp32"),
    "float16": partly(switch({"precision": "fp16"}), "master weights and states stay fp32"),
    "fp8": switch({"precision": "fp8"}),
    "gradient_checkpointing": _recompute,
    "activation_offloading": switch({"memory.offload": "activations"}),
    "flash_attention": unneeded("the fastest attention of torch is chosen"),
    "flash_attn_*": KERNELS,
    "sdp_attention": unneeded("the fastest attention of torch is chosen"),
    "xformers_attention": unneeded("the fastest attention of torch is chosen"),
    "flex_attention": unneeded("the fastest attention of torch is chosen"),
    "attn_implementation": unneeded("the fastest attention of torch is chosen"),
    "s2_attention": absent("S²-attention is not in Weft"),
    "plugins": absent("Weft has no plugins of axolotl"),
    "liger_*": KERNELS,
    "cut_cross_entropy": KERNELS,
    "unsloth_*": KERNELS,
    "lora_*_kernel": KERNELS,
    "evals_per_epoch": _per_epoch("train.eval_every"),
    "saves_per_epoch": _per_epoch("checkpoint.every"),
    "eval_max_new_tokens": absent("evaluation keeps only the loss"),
    "eval_table_size": absent("evaluation keeps only the loss"),
    "eval_batch_size": unneeded("evaluation uses train.microbatch"),
    "do_bench_eval": absent("evaluation keeps only the loss"),
    "early_stopping_patience": absent("a run takes train.steps steps"),
    "auto_resume_from_checkpoints": unneeded("a run that is started again resumes by itself"),
    "local_rank": unneeded("the launcher sets it"),
    "debug": absent("weft diagnose RUN names causes of faults"),
    "wandb_project": _wandb,
    "wandb_*": unneeded("wandb's environment variables set it"),
    "mlflow_experiment_name": _mlflow,
    "mlflow_*": unneeded("mlflow's environment variables set it"),
    "use_tensorboard": switch({"watch.trackers": ["tensorboard"]}),
    "comet_*": absent("trackers are tensorboard, wandb, mlflow and trackio"),
    "deepspeed": absent("convert that file too: weft convert FILE"),
    "fsdp_version": unneeded("Weft uses FSDP2"),
    **with_prefix(FSDP_TABLE, "fsdp_config.fsdp_"),
    **with_prefix(FSDP_TABLE, "fsdp_config."),
    "dp_shard_size": to("parallel.dp_shard"),
    "dp_replicate_size": to("parallel.dp_replicate"),
    "tensor_parallel_size": to("parallel.tp"),
    "context_parallel_size": to("parallel.cp"),
    "sequence_parallel_degree": to("parallel.cp"),
    "expert_parallel_size": to("parallel.ep"),
    "heads_k_stride": unneeded("parallel.cp_style chooses"),
    "ring_attn_func": unneeded("parallel.cp_style chooses"),
    "rl": absent("reinforcement learning is not in Weft"),
    "trl*": absent("reinforcement learning is not in Weft"),
    "rope_scaling*": absent("set model.rope_scaling: {kind, factor}"),
    "overrides_of_model_config*": absent("fields of model override the checkpoint's config"),
    "noisy_embedding_alpha": absent("no noise is added to embeddings"),
    "dataloader_*": training_arguments.DATA_LOADER,
    "ddp": switch({"parallel.dp_replicate": -1, "parallel.dp_shard": 1}),
    "device_map": unneeded("the plan places weights"),
    "max_memory*": unneeded("memory.budget_gib limits memory"),
    "low_cpu_mem_usage": unneeded("each rank reads its own shard of the weights"),
    "loss_watchdog_*": unneeded("guards roll a run back at spikes and end it when it diverges"),
    "embedding_lr*": absent("set optim.layer_decay, or a group of your own optimizer"),
    "lr_groups*": absent("set optim.layer_decay, or a group of your own optimizer"),
    "muon_*": absent("optim.lr and optim.momentum are muon's"),
    "metric_for_best_model": absent("checkpoint.keep keeps the last ones"),
    "greater_is_better": absent("checkpoint.keep keeps the last ones"),
    "rl_*": absent("reinforcement learning is not in Weft"),
    "dpo_*": absent("preference training is not in Weft"),
    "orpo_*": absent("preference training is not in Weft"),
    "kto_*": absent("preference training is not in Weft"),
    "simpo_*": absent("preference training is not in Weft"),
    "reward_model*": absent("reward models are not in Weft"),
    "streaming": switch({"data.streaming": True}),
    "streaming_*": unneeded("data.streaming shuffles the samples of 8 parts together"),
    "excess_length_strategy": absent("conversations longer than data.seq_len are cut"),
    "min_sample_len": absent("no conversation is left out for its length"),
    "tokenizer_save_jinja_files": unneeded("an export has the template of the tokenizer"),
    "use_wandb": _wandb,
    "use_mlflow": _mlflow,
    "processor_type": absent("pictures and texts together are model.family=clip only"),
    "skip_prepare_dataset": unneeded("data is tokenized once"),
    "remove_unused_columns": unneeded("records may have other fields"),
    "image_*": absent("pictures and texts together are model.family=clip only"),
    "quantization*": absent("weights are not quantized in training"),
    "qat*": absent("quantization-aware training is not in Weft"),
    "llm_compressor*": absent("pruning is not in Weft"),
    "model_quantization_config*": absent("weights are not quantized in training"),
    "use_kernels": KERNELS,
    "*_kernels": KERNELS,
    "experts_implementation": KERNELS,
    "layer_offloading": partly(
        switch({"memory.offload": "states"}), "states leave the device; compute weights stay on it"
    ),
    "profiler_steps*": absent("set watch.trace: {at, steps}"),
    "gc_steps": unneeded("garbage is collected between steps"),
    "gc_*": unneeded("garbage is collected between steps"),
    "trainer_cls": absent("the training loop is Weft's"),
    "curriculum_sampling": absent("data.shuffle=none keeps the order of the source"),
    "diffusion*": absent("diffusion models of text are not in Weft"),
    "kd_*": absent("distillation is not in Weft"),
    "fp8_*": unneeded("Weft's own fp8 layers are used"),
    "save_first_step": absent("checkpoints are at multiples of checkpoint.every"),
}


def detect(text: str, path: Path) -> bool:
    return has_keys(text, "base_model")


def _warmup_and_logging(steps: int) -> tuple[float, int]:
    """The warm-up and the steps between log lines that axolotl derives from the steps of a run; 0 steps: unknown."""
    if steps <= 0:
        return 0.03, 10
    warmup = min(int(0.03 * steps), 100)
    return 2 if warmup == 1 else warmup, max(1, min(10, int(0.005 * steps)))


def _defaults(settings: Settings) -> dict[str, tuple[Any, str]]:
    defaults = training_arguments.defaults(settings, "micro_batch_size", 1, "num_epochs", 1)
    del defaults["optim.lr"]  # axolotl refuses a config without learning_rate
    said = "the default of axolotl"
    warmup, log_every = _warmup_and_logging(int(settings.number("max_steps", default=0)))
    defaults |= {
        "optim.schedule": ("cosine", said), "data.seq_len": (512, "the default of sequence_len"),
        "data.val_fraction": (0.0, "the default of val_set_size"),
        "memory.recompute": ("none", "gradient_checkpointing is off"),
        "optim.warmup": (warmup, f"{said}, at most 100 steps"), "watch.every": (log_every, f"{said}, at most 10"),
        "checkpoint.every": (500, "axolotl saves after each epoch; checkpoint.every counts steps"),
        "checkpoint.keep": (4, "the default of save_total_limit"),
    }  # fmt: skip
    if "bf16" not in settings:
        defaults["precision"] = ("auto", "the default of bf16 is auto")
    return defaults


AXOLOTL = SourceFormat(
    "axolotl", "an axolotl config", read, detect, TABLE,
    defaults=_defaults,
    missing={
        "model": "no base_model; add model=hf:PATH",
        "optim.lr": "no learning_rate, which axolotl requires; add optim.lr=…, else Weft's default applies",
        "data.source": "add data.source=PATH, a file of data.format or a token store made by weft data build",
    },
)  # fmt: skip
