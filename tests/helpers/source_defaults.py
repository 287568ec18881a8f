"""Defaults of other libraries, read from their sources in August 2026: a setting that is left out, and its default.

torchtitan b5bcd76c (torchtitan/config/configs.py, components/) and v0.1 (job_config.py) for TOML; Megatron-LM d98e8a64
(megatron/training/config, megatron/core/optimizer/optimizer_config.py, megatron/training/arguments.py); LLaMA-Factory
ff6d4d12 (src/llamafactory/hparams, src/llamafactory/v1/config, v1/core/base_trainer.py) on transformers'
TrainingArguments; axolotl's schema with those; DeepSpeed's runtime/constants.py and lr_schedules.py.
"""

from __future__ import annotations

from typing import Any

TRAINING_ARGUMENTS: dict[str, Any] = {
    "learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0, "num_train_epochs": 3, "lr_scheduler_type": "linear", "warmup_steps": 0, "seed": 42,
    "save_steps": 500, "logging_steps": 500, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "bf16": False, "fp16": False, "optim": "adamw_torch", "ddp_timeout": 1800, "label_smoothing_factor": 0.0,
    "torch_compile": False, "eval_strategy": "no", "gradient_checkpointing": False,
}  # fmt: skip

DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llamafactory": (
        "model_name_or_path: a/b\nfinetuning_type: lora\nstage: sft\n",
        {key: value for key, value in TRAINING_ARGUMENTS.items() if key != "gradient_checkpointing"}
        | {
            "cutoff_len": 2048, "lora_rank": 8, "lora_dropout": 0.0, "val_size": 0.0, "train_on_prompt": False,
            "disable_gradient_checkpointing": False, "lora_target": "all",
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
            "checkpoint.enable": False, "activation_checkpoint.mode": "selective", "validation.enable": False,
            "validation.freq": 10, "validation.steps": -1, "metrics.log_freq": 10, "comm.train_timeout_seconds": 100,
        },
    ),
    "megatron": (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --lr 1e-4 --train-iters 100"
        " --global-batch-size 8 --micro-batch-size 1 --position-embedding-type rope --swiglu",
        {
            "optimizer": "adam", "weight-decay": 0.01, "adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8,
            "clip-grad": 1.0, "sgd-momentum": 0.9, "lr-decay-style": "linear", "lr-warmup-iters": 0,
            "log-interval": 100, "eval-iters": 100, "seed": 1234, "distributed-timeout-minutes": 10,
            "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1,
            "expert-model-parallel-size": 1, "norm-epsilon": 1e-5,
            "hidden-dropout": 0.1, "attention-dropout": 0.1, "normalization": "LayerNorm", "rotary-base": 10000,
        },
    ),
    "axolotl": (
        "base_model: a/b\n",
        {
            "learning_rate": 2e-4 / 4, "max_grad_norm": 1.0, "lr_scheduler": "cosine", "adam_epsilon": 1e-8,
            "weight_decay": 0.0, "optimizer": "adamw_torch_fused", "train_on_inputs": False, "warmup_steps": 0,
        },
    ),
    "deepspeed": (
        '{"train_batch_size": 8}',
        {
            "gradient_clipping": 0.0, "bf16.enabled": False, "fp16.enabled": False,
            "zero_optimization.stage": 0, "steps_per_print": 10,
        },
    ),
}  # fmt: skip
"""A small config of each format, and the defaults of settings that it leaves out."""
