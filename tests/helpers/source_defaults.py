"""Defaults of other libraries: the value that a setting has where a file leaves it out, read from these sources.

- TrainingArguments: transformers 5.23.0, training_args.py.
- LLaMA-Factory: commit ff6d4d12 (0.9.6.dev0), src/llamafactory/hparams; its other rows are TrainingArguments'.
- LLaMA-Factory v1: the same commit, src/llamafactory/v1: config, core/base_trainer.py, plugins.
- torchtitan's TOML: v0.2.2, torchtitan/config/job_config.py.
- torchtitan's Python: commit b5bcd76c, torchtitan/config/configs.py, torchtitan/trainer.py and torchtitan/components.
- Megatron-LM: commit d98e8a64, megatron/training: arguments.py, config; megatron/core: transformer_config.py.
- axolotl: 0.19.0, utils/schemas and core/builders/base.py; what it does not set is TrainingArguments'.
- DeepSpeed: 0.19.8, runtime: constants.py, precision_config.py, zero/config.py, lr_schedules.py; ops/adam.
"""

from __future__ import annotations

from typing import Any

TRAINING_ARGUMENTS: dict[str, Any] = {
    "learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0, "num_train_epochs": 3, "lr_scheduler_type": "linear", "warmup_steps": 0, "seed": 42,
    "save_steps": 500, "logging_steps": 500, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "bf16": False, "fp16": False, "optim": "adamw_torch_fused", "ddp_timeout": 1800, "label_smoothing_factor": 0.0,
    "torch_compile": False, "eval_strategy": "no", "gradient_checkpointing": None,
}  # fmt: skip

DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llamafactory": (
        "model_name_or_path: a/b\n",
        {key: value for key, value in TRAINING_ARGUMENTS.items() if key != "gradient_checkpointing"}
        | {
            "cutoff_len": 2048, "lora_rank": 8, "lora_dropout": 0.0, "val_size": 0.0, "train_on_prompt": False,
            "disable_gradient_checkpointing": False, "lora_target": "all", "finetuning_type": "lora", "stage": "sft",
        },
    ),
    "llamafactory-v1": (
        "model: a/b\nmodel_class: llm\n",
        {
            "micro_batch_size": 1, "cutoff_len": 2048, "learning_rate": 1e-4, "num_train_epochs": 3, "seed": 42,
            "max_grad_norm": 1.0, "bf16": True, "batching_strategy": "normal", "enable_activation_checkpointing": True,
            "cp_size": 1, "dist_timeout": 18000, "logging_steps": 1, "mp_replicate_size": 1,
        },
    ),
    "llamafactory-v1, lora": (
        "model: a/b\npeft_config: {name: lora}\n",
        {
            "peft_config.r": 8, "peft_config.lora_alpha": 16, "peft_config.lora_dropout": 0.05,
            "peft_config.target_modules": "all",
        },
    ),
    "torchtitan": (
        "[model]\nname = 'llama3'\nflavor = '8B'\n",
        {
            "optimizer.name": "AdamW", "optimizer.lr": 8e-4, "optimizer.beta1": 0.9, "optimizer.beta2": 0.95,
            "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1, "lr_scheduler.warmup_steps": 200,
            "lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 0.0, "training.local_batch_size": 8,
            "training.seq_len": 2048, "training.max_norm": 1.0, "training.steps": 10000,
            "training.mixed_precision_param": "bfloat16", "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": -1, "parallelism.fsdp_reshard_after_forward": "default",
            "parallelism.tensor_parallel_degree": 1, "parallelism.pipeline_parallel_degree": 1,
            "parallelism.context_parallel_degree": 1, "parallelism.expert_parallel_degree": 1,
            "parallelism.pipeline_parallel_schedule": "1F1B", "compile.enable": False, "checkpoint.interval": 500,
            "checkpoint.enable": False, "checkpoint.keep_latest_k": 10,
            "activation_checkpoint.mode": "selective", "validation.enable": False,
            "validation.freq": 10, "validation.steps": -1, "metrics.log_freq": 10, "comm.train_timeout_seconds": 100,
        },
    ),
    "torchtitan-python": (
        "from torchtitan.trainer import Trainer\ndef llama3_8b() -> Trainer.Config:\n    return Trainer.Config()",
        {
            "training.num_tokens_per_microbatch_per_dp_rank": 16384, "training.num_tokens_per_train_step": -1,
            "training.max_context_length": 2048, "training.max_norm": 1.0, "training.steps": 10000,
            "training.dtype": "float32", "training.mixed_precision_param": "bfloat16",
            "lr_scheduler.warmup_steps": 200, "lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 0.0,
            "parallelism.fsdp_reshard_after_forward": "default", "parallelism.enable_sequence_parallel": True,
            "compile.enable": False, "checkpoint.enable": False, "checkpoint.interval": 500,
            "checkpoint.keep_latest_k": 10, "validator.enable": False, "validator.freq": 10, "validator.steps": -1,
            "metrics.log_freq": 10, "comm.train_timeout_seconds": 100,
        },
    ),
    "megatron": (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --lr 1e-4 --train-iters 100"
        " --global-batch-size 8 --micro-batch-size 1 --position-embedding-type rope --swiglu",
        {
            "optimizer": "adam", "weight-decay": 0.01, "adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8,
            "clip-grad": 1.0, "sgd-momentum": 0.9, "lr-decay-style": "linear", "lr-warmup-iters": 0,
            "lr-warmup-init": 0.0, "log-interval": 100, "eval-iters": 100, "seed": 1234,
            "distributed-timeout-minutes": 10,
            "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1,
            "expert-model-parallel-size": 1, "norm-epsilon": 1e-5,
            "hidden-dropout": 0.1, "attention-dropout": 0.1, "normalization": "LayerNorm", "rotary-base": 10000,
            "ffn-hidden-size": 128,
        },
    ),
    "axolotl": (
        "base_model: a/b\n",
        {
            "max_grad_norm": 1.0, "lr_scheduler": "cosine", "adam_beta1": 0.9, "adam_beta2": 0.999,
            "adam_epsilon": 1e-8, "weight_decay": 0.0, "optimizer": "adamw_torch_fused", "train_on_inputs": False,
            "warmup_ratio": 0.03, "logging_steps": 10, "save_total_limit": 4, "seed": 42, "bf16": "auto",
            "sequence_len": 512, "val_set_size": 0.0, "gradient_checkpointing": False, "micro_batch_size": 1,
            "gradient_accumulation_steps": 1, "num_epochs": 1.0,
        },
    ),
    "axolotl, 400 steps": ("base_model: a/b\nmax_steps: 400\n", {"warmup_steps": 12, "logging_steps": 2}),
    "deepspeed": (
        '{"train_batch_size": 8}',
        {
            "gradient_clipping": 1.0, "bf16.enabled": False, "fp16.enabled": False, "zero_optimization.stage": 0,
            "steps_per_print": None, "prescale_gradients": False,
        },
    ),
    "deepspeed, optimizer": (
        '{"optimizer": {"type": "AdamW"}}',
        {
            "optimizer.params.lr": 1e-3, "optimizer.params.betas": [0.9, 0.999], "optimizer.params.eps": 1e-8,
            "optimizer.params.weight_decay": 0.0, "optimizer.params.torch_adam": False,
        },
    ),
    "deepspeed, torch's Adam": (
        '{"optimizer": {"type": "Adam", "params": {"torch_adam": true}}}',
        {"optimizer.params.lr": 1e-3, "optimizer.params.weight_decay": 0.01},
    ),
    "deepspeed, WarmupDecayLR": (
        '{"optimizer": {"type": "Adam", "params": {"lr": 1e-5}}, "scheduler": {"type": "WarmupDecayLR"}}',
        {
            "scheduler.params.warmup_max_lr": 1e-3, "scheduler.params.warmup_min_lr": 0.0,
            "scheduler.params.warmup_num_steps": 1000,
        },
    ),
    "deepspeed, WarmupCosineLR": (
        '{"scheduler": {"type": "WarmupCosineLR"}}',
        {
            "scheduler.params.warmup_num_steps": 1000, "scheduler.params.cos_min_ratio": 0.0001,
            "scheduler.params.warmup_min_ratio": 0.0,
        },
    ),
}  # fmt: skip
"""By format, perhaps with a case after a comma: a small config, and the defaults of settings that it leaves out."""
