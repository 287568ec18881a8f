"""Accelerate's YAML, as `accelerate config` writes it, with its FSDP, DeepSpeed and Megatron-LM sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.extensions.convert.conversion import SourceFormat
from weft.extensions.convert.deepspeed import DS_TABLE, OFFLOAD_STATES, ZERO_STAGES
from weft.extensions.convert.settings import (
    Result,
    Rule,
    Settings,
    absent,
    as_number,
    choice,
    flatten,
    partly,
    switch,
    to,
    unneeded,
    with_prefix,
)
from weft.job.errors import JobError
from weft.job.load import read_yaml

RENDEZVOUS = unneeded("the launcher sets it: torchrun, weft train --nproc, weft launch")
FOUND = unneeded("blocks are found by Weft")

SHARDING: dict[str, dict[str, Any] | str] = {
    **{name: {"parallel.dp_shard": -1, "parallel.zero": 3} for name in ("full_shard", "1")},
    **{name: {"parallel.dp_shard": -1, "parallel.zero": 2} for name in ("shard_grad_op", "2")},
    **{name: {"parallel.dp_replicate": -1, "parallel.dp_shard": 1} for name in ("no_shard", "3")},
}


def _hybrid(zero: int) -> Rule:
    def rule(value: Any, settings: Settings) -> Result:
        machines = int(settings.number("num_machines"))
        return Result({"parallel.dp_replicate": machines, "parallel.dp_shard": -1, "parallel.zero": zero},
                      "shards inside a node, replicas between nodes")  # fmt: skip

    return rule


def _sharding(value: Any, settings: Settings) -> Result:
    hybrid = {"hybrid_shard": 3, "4": 3, "hybrid_shard_zero2": 2, "5": 2}
    key = str(value).lower()
    return (_hybrid(hybrid[key]) if key in hybrid else choice(SHARDING))(value, settings)


def _reshard(value: Any, settings: Settings) -> Result:
    """FSDP2 has true or false here, FSDP1 the name of a strategy."""
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        zero = 3 if str(value).lower() == "true" else 2
        return Result({"parallel.dp_shard": -1, "parallel.zero": zero})
    return _sharding(value, settings)


def _processes(value: Any, settings: Settings) -> Result:
    machines = int(settings.number("num_machines"))
    return Result({"cluster.devices_per_node": max(1, int(as_number(value) or 1) // machines)})


def _fsdp(settings: Settings) -> bool:
    return str(settings.get("distributed_type", "")).upper() == "FSDP"


FSDP_TABLE: dict[str, Rule] = {
    "version": unneeded("Weft uses FSDP2"),
    "sharding_strategy": _sharding,
    "reshard_after_forward": _reshard,
    "offload_params": partly(
        switch({"memory.offload": "states"}), "states leave the device; compute weights stay on it"
    ),
    "activation_checkpointing": switch({"memory.recompute": "full"}),
    "activation_cpu_offload": switch({"memory.offload": "activations"}),
    "auto_wrap_policy": FOUND,
    "transformer_layer_cls_to_wrap": FOUND,
    "min_num_params": FOUND,
    "backward_prefetch*": unneeded("the next block is gathered during the backward pass"),
    "forward_prefetch": unneeded("the next block is gathered during the forward pass"),
    "cpu_ram_efficient_loading": unneeded("each rank reads its own shard of the weights"),
    "sync_module_states": unneeded("ranks start from the same weights"),
    "state_dict_type": unneeded("a checkpoint opens in every layout"),
    "use_orig_params": unneeded("FSDP2 keeps the parameters of the model"),
    "limit_all_gathers": unneeded("FSDP2 does so"),
    "ignored_modules": absent("every parameter is sharded"),
    "final_state_dict_type": unneeded("a checkpoint opens in every layout"),
    "transformer_cls_names_to_wrap": FOUND,
    "cpu_offload_pin_memory": unneeded("offloaded states are in pinned memory"),
    "device_mesh": absent("set parallel.dp_replicate and parallel.dp_shard"),
    "gradient_divide_factor": absent("gradients are divided by the number of valid targets of all ranks"),
    "xla*": absent("XLA is not in Weft"),
    "mixed_precision_policy*": unneeded("precision: bf16 casts weights and sums gradients in fp32"),
}  # fmt: skip

DEEPSPEED_TABLE: dict[str, Rule] = {
    "zero_stage": choice(ZERO_STAGES),
    "offload_optimizer_device": choice(OFFLOAD_STATES),
    "offload_param_device": partly(
        choice(OFFLOAD_STATES), "compute weights stay on the device; the states leave it"
    ),
    "offload_optimizer_nvme_path": to("memory.disk"),
    "offload_param_nvme_path": to("memory.disk"),
    "gradient_accumulation_steps": to("train.accumulation"),
    "gradient_clipping": to("optim.clip"),
    "zero3_init_flag": unneeded("each rank makes its own shard of the weights"),
    "zero3_save_16bit_model": unneeded("weft export RUN writes whole weights"),
    "deepspeed_config_file": absent("convert that file too: weft convert FILE"),
    "deepspeed_multinode_launcher": RENDEZVOUS,
    "deepspeed_hostfile": RENDEZVOUS,
    "deepspeed_exclusion_filter": RENDEZVOUS,
    "deepspeed_inclusion_filter": RENDEZVOUS,
    "deepspeed_moe_layer_cls_names": FOUND,
}  # fmt: skip

MEGATRON_TABLE: dict[str, Rule] = {
    "tp_degree": to("parallel.tp"),
    "pp_degree": to("parallel.pp"),
    "num_micro_batches": to("train.accumulation"),
    "sequence_parallelism": switch({"parallel.sequence": True}, {"parallel.sequence": False}),
    "recompute_activations": switch({"memory.recompute": "selective"}),
    "use_distributed_optimizer": switch({"parallel.zero": 1}),
    "gradient_clipping": to("optim.clip"),
}  # fmt: skip

AXES_TABLE: dict[str, Rule] = {
    "dp_replicate_size": to("parallel.dp_replicate"),
    "dp_shard_size": to("parallel.dp_shard"),
    "tp_size": to("parallel.tp"),
    "cp_size": to("parallel.cp"),
    "sp_size": partly(to("parallel.cp"), "Ulysses; parallel.cp_style chooses"),
    "cp_comm_strategy": unneeded("parallel.cp_style chooses ring, ulysses or hybrid"),
}  # fmt: skip

TABLE: dict[str, Rule] = {
    "compute_environment": choice({"local_machine": {}, "amazon_sagemaker": "SageMaker is not supported"}),
    "distributed_type": choice({
        "no": {}, "fsdp": {"parallel.dp_shard": -1, "parallel.zero": 3}, "deepspeed": {"parallel.dp_shard": -1},
        "multi_gpu": {"parallel.dp_replicate": -1, "parallel.dp_shard": 1}, "megatron_lm": {"parallel.dp_shard": -1},
        "multi_cpu": {"parallel.dp_replicate": -1, "parallel.dp_shard": 1, "cluster.device": "cpu"},
        "tp": {"parallel.dp_shard": -1}, "xla": "TPUs are not supported", "multi_npu": "NPUs are not supported",
        "multi_xpu": "XPUs are not supported",
    }),
    "mixed_precision": choice({
        "no": {"precision": "fp32"}, "bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"},
        "fp8": {"precision": "fp8"},
    }),
    "num_processes": _processes,
    "num_machines": to("cluster.nodes"),
    "machine_rank": RENDEZVOUS,
    "main_process_ip": RENDEZVOUS,
    "main_process_port": RENDEZVOUS,
    "main_training_function": unneeded("weft train JOB, or a script with the import changed (docs/your-own-code.md)"),
    "rdzv_backend": RENDEZVOUS,
    "rdzv_conf*": RENDEZVOUS,
    "same_network": RENDEZVOUS,
    "gpu_ids": unneeded("CUDA_VISIBLE_DEVICES"),
    "use_cpu": switch({"cluster.device": "cpu"}),
    "debug": absent("weft diagnose RUN names causes of faults"),
    "downcast_bf16": unneeded("for TPUs"),
    "enable_cpu_affinity": absent("the operating system places ranks"),
    "gradient_accumulation_steps": to("train.accumulation"),
    "gradient_clipping": to("optim.clip"),
    "dynamo_config.dynamo_backend": choice({"no": {}, "inductor": {"train.compile": True}}),
    "dynamo_config.*": absent("Weft compiles each block with inductor"),
    "dynamo_backend": choice({"no": {}, "inductor": {"train.compile": True}}),
    "fp8_config.*": partly(switch({"precision": "fp8"}), "Weft's fp8 kernels; see the section fp8 of a job"),
    "ipex_config.*": absent("torch's own CPU kernels are used"),
    "mpirun_config.*": RENDEZVOUS,
    "tpu_*": unneeded("for TPUs"),
    "command_file": absent("TPUs are not supported"),
    "commands": absent("TPUs are not supported"),
    **with_prefix(FSDP_TABLE, "fsdp_config.fsdp_"),
    **with_prefix(DEEPSPEED_TABLE, "deepspeed_config."),
    **with_prefix(DS_TABLE, "deepspeed_config."),
    **with_prefix(MEGATRON_TABLE, "megatron_lm_config.megatron_lm_"),
    **with_prefix(AXES_TABLE, "parallelism_config.parallelism_config_"),
    "parallelism_config.parallelism_config_sp_*": absent("set parallel.cp, and parallel.cp_style=ulysses"),
    **dict.fromkeys(
        ("ec2_instance_type", "iam_role_name", "image_uri", "py_version", "pytorch_version", "region",
         "transformers_version", "base_job_name", "profile", "additional_args", "sagemaker_*"),
        absent("weft launch starts jobs by ssh, MPI, Slurm, Kubernetes and Ray, not on SageMaker"),
    ),
    "fsdp_config.fsdp_sharding_strategy": _sharding,
    "fsdp_config.fsdp_reshard_after_forward": _reshard,
}  # fmt: skip
TABLE |= with_prefix(DEEPSPEED_TABLE, "deepspeed_config.")  # where both have a key, Accelerate's


def read_sections(text: str, file: str) -> dict[str, Any]:
    """A YAML mapping."""
    value = read_yaml(text, file)
    if not isinstance(value, dict):
        raise JobError(f"{file} must hold settings such as `key: value`, not a {type(value).__name__}")
    return {str(key): inner for key, inner in value.items()}


def read(text: str, file: str) -> Settings:
    value = read_sections(text, file)
    return flatten(value) if value else Settings()


def has_keys(text: str, *keys: str) -> bool:
    """Whether one of these keys begins a line of a YAML text."""
    starts = tuple(f"{key}:" for key in keys)
    return any(line.startswith(starts) for line in text.splitlines())


def detect(text: str, path: Path) -> bool:
    return has_keys(text, "distributed_type", "compute_environment", "fsdp_config", "num_processes") and not has_keys(
        text, "base_model", "model_name_or_path"
    )


ACCELERATE = SourceFormat(
    "accelerate", "an Accelerate config", read, detect, TABLE,
    ranks=lambda settings: int(settings.number("num_processes", default=0)) or None,
    missing={
        "model": "the config does not name a model; add model=hf:PATH or model.shape=…",
        "data.source": "the config does not name data; add data.source=…, else Weft reads pydoc",
        "train.steps": "the config does not say how long to train; add train.steps=…",
        "train.global_batch": "the config does not have a batch size; add train.global_batch=…",
        "optim.lr": "the config does not have an optimizer; add optim.lr=…, else Weft's defaults apply",
    },
)  # fmt: skip
