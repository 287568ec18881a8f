"""DeepSpeed's ds_config.json."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from pathlib import Path
from typing import Any

from weft.extensions.convert.conversion import SourceFormat
from weft.extensions.convert.settings import (
    Result,
    Rule,
    Settings,
    absent,
    accumulation,
    as_number,
    choice,
    device_batch,
    flatten,
    partly,
    switch,
    to,
    unneeded,
)
from weft.job.errors import JobError

OVERLAP = unneeded("Weft overlaps communication with the backward pass")
BUFFERS = unneeded("Weft sizes its buffers by the layers of the model")
FROM_OUTSIDE = "auto: filled in by the calling library"

ZERO_STAGES: dict[str, dict[str, Any] | str] = {
    "0": {"parallel.dp_replicate": -1, "parallel.dp_shard": 1},
    **{str(stage): {"parallel.dp_shard": -1, "parallel.zero": stage} for stage in (1, 2, 3)},
}
OFFLOAD_STATES: dict[str, dict[str, Any] | str] = {
    "none": {}, "cpu": {"memory.offload": "states"}, "nvme": {"memory.offload": "states"},
}  # fmt: skip
OWN_OPTIMIZER = "Weft has adamw, sgd, adafactor, muon, lars and lamb; others register by a job's extensions"
OPTIMIZERS: dict[str, dict[str, Any] | str] = {
    "adam": {"optim.name": "adamw"}, "adamw": {"optim.name": "adamw"}, "fusedadam": {"optim.name": "adamw"},
    "deepspeedcpuadam": {"optim.name": "adamw", "memory.offload": "states"}, "sgd": {"optim.name": "sgd"},
    "adafactor": {"optim.name": "adafactor"}, "muon": {"optim.name": "muon"},
    "onebitadam": {"optim.name": "adamw", "comm.compression": "onebit"},
    "zerooneadam": {"optim.name": "adamw", "comm.compression": "onebit"},
    "lamb": {"optim.name": "lamb"}, "fusedlamb": {"optim.name": "lamb"},
    "onebitlamb": {"optim.name": "lamb", "comm.compression": "onebit"},
    "lion": OWN_OPTIMIZER, "adagrad": OWN_OPTIMIZER,
}  # fmt: skip
DEFAULT_RATE = 0.001
"""The learning rate of DeepSpeed's and torch's optimizers, and the peak of WarmupDecayLR, where a config has none."""
SCHEDULERS: dict[str, dict[str, Any] | str] = {
    "warmuplr": {"optim.schedule": "constant"},
    "warmupdecaylr": {"optim.schedule": "linear", "optim.min_lr": 0.0},
    "warmupcosinelr": {"optim.schedule": "cosine"},
    "lrrangetest": "weft tune JOB --over optim.lr=… searches learning rates",
    "onecycle": "Weft has constant, linear, cosine and wsd",
}


def _accumulation(value: Any, settings: Settings) -> Result:
    if as_number(settings.get("train_micro_batch_size_per_gpu")) is not None:
        return accumulation("train.microbatch")(value, settings)
    return to("train.accumulation")(value, settings)


def _compression_of_type(value: Any, settings: Settings) -> Result:
    return choice({"fp32": {}, "fp16": {"comm.compression": "fp16"}, "bf16": {"comm.compression": "bf16"},
                   "bfp16": {"comm.compression": "bf16"}})(value, settings)  # fmt: skip


def _warmup_rate(value: Any, settings: Settings) -> Result:
    if as_number(settings.get("optimizer.params.lr")) is None:
        return to("optim.lr")(value, settings)
    same = as_number(value) == as_number(settings.get("optimizer.params.lr"))
    note = "the peak, as the optimizer's lr" if same else "the peak of the schedule replaces the optimizer's lr"
    return Result({"optim.lr": as_number(value)}, note)


def _checkpoint_every(value: Any, settings: Settings) -> Result:
    return partly(switch({"memory.recompute": "full"}), "Weft recomputes whole blocks")(value, settings)


def _recomputed_blocks(value: Any, settings: Settings) -> Result:
    if settings.is_on("activation_checkpointing.cpu_checkpointing"):
        return Result(note="memory.offload recomputes what it does not keep", status="not needed")
    return partly(to("memory.recompute"), "blocks that are recomputed")(value, settings)


def _rate(value: Any, settings: Settings) -> Result:
    if _schedule_sets_the_rate(settings):
        return Result({"optim.lr": DEFAULT_RATE}, "warmup_max_lr of WarmupDecayLR is 0.001 by default and replaces it")
    return to("optim.lr")(value, settings)


def _schedule_sets_the_rate(settings: Settings) -> bool:
    """Whether the peak is the default of WarmupDecayLR's warmup_max_lr."""
    decays = str(settings.get("scheduler.type")).lower() == "warmupdecaylr"
    return decays and "scheduler.params.warmup_max_lr" not in settings


_BATCH = device_batch("gradient_accumulation_steps", "tensor_parallel.autotp_size", count="train_batch_size")

TABLE: dict[str, Rule] = {
    "train_batch_size": to("train.global_batch"),
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _accumulation,
    "gradient_clipping": to("optim.clip"),
    "steps_per_print": to("watch.every"),
    "seed": to("train.seed"),
    "optimizer.type": choice(OPTIMIZERS),
    "optimizer.params.lr": _rate,
    "optimizer.params.betas": to("optim.betas"),
    "optimizer.params.eps": to("optim.eps"),
    "optimizer.params.momentum": to("optim.momentum"),
    "optimizer.params.weight_decay": partly(to("optim.weight_decay"), "vectors such as biases are not decayed"),
    "optimizer.params.torch_adam": unneeded("the implementation does not change the update"),
    "optimizer.params.adam_w_mode": unneeded("weight decay is decoupled, as in AdamW"),
    "optimizer.params.bias_correction": absent("Weft's AdamW corrects the bias of its moments"),
    "optimizer.params.freeze_step": to("comm.compression_warmup"),
    "optimizer.params.*": absent("the optimizer has no such parameter in Weft"),
    "optimizer.legacy_fusion": unneeded("the implementation does not change the update"),
    "scheduler.type": choice(SCHEDULERS),
    "scheduler.params.warmup_max_lr": _warmup_rate,
    "scheduler.params.warmup_min_lr": absent("Weft's warm-up starts from 0"),
    "scheduler.params.warmup_num_steps": to("optim.warmup"),
    "scheduler.params.warmup_type": partly(
        choice({"linear": {}, "log": {"optim.schedule": "constant"}}), "Weft's warm-up is linear"
    ),
    "scheduler.params.total_num_steps": to("train.steps"),
    "scheduler.params.cos_min_ratio": to("optim.min_lr"),
    "scheduler.params.warmup_min_ratio": absent("Weft's warm-up starts from 0"),
    "scheduler.params.*": absent("the schedule has no such parameter in Weft"),
    "fp16.enabled": switch({"precision": "fp16"}),
    "fp16.*": unneeded("Weft scales the loss dynamically in fp16"),
    "bf16.enabled": switch({"precision": "bf16"}),
    "bfloat16.enabled": switch({"precision": "bf16"}),
    "bf16.*": unneeded("master weights and optimizer state are fp32"),
    "torch_autocast.enabled": partly(switch({"precision": "bf16"}), "Weft casts weights as FSDP does"),
    "torch_autocast.dtype": choice({"bfloat16": {"precision": "bf16"}, "float16": {"precision": "fp16"}}),
    "torch_autocast.*": unneeded("norms and losses are computed in fp32"),
    "amp.enabled": partly(switch({"precision": "fp16"}), "Apex is not used"),
    "amp.*": absent("Apex is not used"),
    "communication_data_type": _compression_of_type,
    "prescale_gradients": unneeded("the loss is divided by the global number of valid tokens"),
    "gradient_predivide_factor": unneeded("the loss is divided by the global number of valid tokens"),
    "sparse_gradients": absent(
        "gradients of embeddings are dense; comm.compression=topk:0.01 sends the largest elements"
    ),
    "zero_optimization.stage": choice(ZERO_STAGES),
    "zero_optimization.offload_optimizer.device": choice(OFFLOAD_STATES),
    "zero_optimization.offload_optimizer.nvme_path": to("memory.disk"),
    "zero_optimization.offload_optimizer.ratio": to("memory.offload_fraction"),
    "zero_optimization.offload_optimizer.*": unneeded("Weft chooses buffers, pinning and threads of the offload"),
    "zero_optimization.offload_param.device": partly(
        choice(OFFLOAD_STATES), "compute weights stay on the device; the states leave it"
    ),
    "zero_optimization.offload_param.nvme_path": to("memory.disk"),
    "zero_optimization.offload_param.*": unneeded("Weft chooses buffers and pinning of the offload"),
    "zero_optimization.cpu_offload": switch({"memory.offload": "states"}),
    "zero_optimization.overlap_comm": OVERLAP,
    "zero_optimization.contiguous_gradients": BUFFERS,
    "zero_optimization.reduce_bucket_size": BUFFERS,
    "zero_optimization.allgather_bucket_size": BUFFERS,
    "zero_optimization.allgather_partitions": BUFFERS,
    "zero_optimization.reduce_scatter": unneeded("gradients of dp_shard are reduce-scattered"),
    "zero_optimization.sub_group_size": BUFFERS,
    "zero_optimization.round_robin_gradients": BUFFERS,
    "zero_optimization.stage3_prefetch_bucket_size": OVERLAP,
    "zero_optimization.stage3_param_persistence_threshold": BUFFERS,
    "zero_optimization.stage3_max_live_parameters": BUFFERS,
    "zero_optimization.stage3_max_reuse_distance": BUFFERS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": unneeded(
        "weft export RUN writes whole weights of any checkpoint"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": unneeded(
        "weft export RUN writes whole weights of any checkpoint"
    ),
    "zero_optimization.elastic_checkpoint": unneeded("a checkpoint opens in every layout"),
    "zero_optimization.load_from_fp32_weights": unneeded("checkpoints hold fp32 weights"),
    "zero_optimization.ignore_unused_parameters": unneeded("parameters without a gradient are not updated"),
    "zero_optimization.zero_hpz_partition_size": partly(
        to("parallel.dp_shard"), "hybrid sharding: shards inside groups of this size, replicas between them"
    ),
    "zero_optimization.mics_shard_size": partly(
        to("parallel.dp_shard"), "hybrid sharding: shards inside groups of this size, replicas between them"
    ),
    "zero_optimization.zero_quantized_weights": partly(
        switch({"comm.compression": "int8"}), "one setting for gradients and gathered weights"
    ),
    "zero_optimization.zero_quantized_gradients": partly(
        switch({"comm.compression": "int8"}), "one setting for gradients and gathered weights"
    ),
    "zero_optimization.*": absent("no such setting of data parallelism in Weft"),
    "zero_allow_untested_optimizer": unneeded("every optimizer works in every layout"),
    "zero_force_ds_cpu_optimizer": unneeded("every optimizer works with memory.offload"),
    "tensor_parallel.autotp_size": to("parallel.tp"),
    "tensor_parallel.*": unneeded("the table of the model's parts says how its layers are split"),
    "sequence_parallel_size": partly(to("parallel.cp"), "Ulysses; parallel.cp_style chooses ring, ulysses or hybrid"),
    "pipeline.stages": to("parallel.pp"),
    "pipeline.partition": unneeded("Weft splits layers by their cost"),
    "pipeline.activation_checkpoint_interval": _checkpoint_every,
    "pipeline.*": unneeded("Weft's pipeline schedules do this as they need"),
    "activation_checkpointing.partition_activations": unneeded("tp splits saved activations (parallel.sequence)"),
    "activation_checkpointing.cpu_checkpointing": switch({"memory.offload": "activations"}),
    "activation_checkpointing.number_checkpoints": _recomputed_blocks,
    "activation_checkpointing.*": unneeded("Weft chooses buffers of recompute itself"),
    "gradient_checkpointing": switch({"memory.recompute": "full"}),
    "compile.enabled": switch({"train.compile": True}),
    "compile.*": absent("Weft compiles each block with inductor"),
    "compile": switch({"train.compile": True}),
    "tensorboard.enabled": switch({"watch.trackers": ["tensorboard"]}),
    "wandb.enabled": switch({"watch.trackers": ["wandb"]}),
    "tensorboard.*": unneeded("event files are in RUN/tensorboard"),
    "wandb.*": unneeded("the run has the job's name; project and team come from wandb's environment variables"),
    "comet.*": absent("trackers are tensorboard, wandb, mlflow and trackio"),
    "csv_monitor.*": unneeded("RUN/metrics.jsonl is always written"),
    "wall_clock_breakdown": unneeded("weft trace JOB shows the parts of a step"),
    "memory_breakdown": unneeded("weft plan JOB --explain memory"),
    "dump_state": unneeded("RUN/job.yaml and RUN/plan.json hold the settings"),
    "flops_profiler.*": unneeded("metrics have mfu; weft dryrun JOB counts FLOPs"),
    "comms_logger.*": unneeded("metrics have the time and bytes of communication (watch.comm_every)"),
    "timers.*": unneeded("weft trace JOB shows the parts of a step"),
    "checkpoint.load_universal": unneeded("a checkpoint opens in every layout"),
    "checkpoint.*": unneeded("checkpoints are written in parallel, in the background"),
    "elasticity.enabled": unneeded("a run continues on any number of ranks"),
    "elasticity.*": unneeded("a run continues on any number of ranks"),
    "autotuning.*": unneeded("weft tune JOB --for speed"),
    "data_types.*": absent("gradients are accumulated in fp32"),
    "data_efficiency.*": absent("data efficiency methods are not in Weft"),
    "curriculum_learning.*": absent("train.batch_ramp raises the batch; sequence lengths are constant"),
    "quantize_training.*": absent("pruning and quantization-aware training are not in Weft"),
    "seq_parallel_communication_data_type": absent("activations are exchanged in the compute data type"),
    "zenflow.*": absent("every gradient is applied in its step"),
    "graph_harvesting": absent("Weft has no CUDA graphs of the whole step; see train.compile"),
    "expert_parallel_size": to("parallel.ep"),
    "use_data_before_expert_parallelism": absent("ranks of ep are neighbours in dp_shard × cp × tp"),
    "compression_training.*": absent("pruning and quantization-aware training are not in Weft"),
    "sparse_attention.*": absent("model.window is the only sparse attention"),
    "progressive_layer_drop.*": absent("no layers are dropped"),
    "eigenvalue.*": absent("no eigenvalues are computed"),
    "aio.*": unneeded("Weft chooses how memory.disk is read"),
    "hybrid_engine.*": absent("generation during training is not in Weft"),
    "nebula.*": absent("checkpoints are files in RUN/checkpoints"),
    "dataloader_drop_last": unneeded("the order of samples is endless; no batch is smaller"),
    "disable_allgather": unneeded("collectives are chosen by the layout"),
    "monitor_config.*": unneeded("RUN/metrics.jsonl is always written"),
}


def with_auto(rule: Rule) -> Rule:
    """Values `auto` come from the library that calls DeepSpeed."""
    return lambda value, settings: (
        Result(note=FROM_OUTSIDE, status="not needed") if value == "auto" else rule(value, settings)
    )


DS_TABLE: dict[str, Rule] = {key: with_auto(rule) for key, rule in TABLE.items()}


def read_json(text: str, file: str) -> Any:
    """JSON without repeated keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if repeated := [key for key, times in Counter(keys).items() if times > 1]:
            raise JobError(f"{file}: the key {repeated[0]!r} is repeated; keep one of them")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise JobError(f"{file} line {error.lineno} is not JSON: {error.msg}") from None
    except RecursionError:
        raise JobError(f"{file} is nested too deeply") from None
    except ValueError as error:  # such as a number with more digits than Python reads
        raise JobError(f"{file} is not JSON: {error}") from None


def read(text: str, file: str) -> Settings:
    """The settings of a ds_config.json."""
    value = read_json(text, file)
    if not isinstance(value, dict):
        raise JobError(f'{file} must hold an object such as {{"zero_optimization": …}}, not a {type(value).__name__}')
    return flatten(value) if value else Settings()


def detect(text: str, path: Path) -> bool:
    return text.lstrip().startswith("{")


DEFAULTS: dict[str, tuple[Any, str]] = {
    "precision": ("fp32", "neither fp16 nor bf16 is on"),
    "optim.clip": (1.0, "DeepSpeed's default since 0.19.3; before, it did not clip"),
    "optim.schedule": ("constant", "there is no scheduler"),
    "optim.warmup": (0, "there is no warm-up"),
    "optim.betas": ([0.9, 0.999], "the default of Adam"),
    "optim.weight_decay": (0.0, "the default of DeepSpeed's optimizers"),
}
SCHEDULER_WARMUP = (1000, "the default of DeepSpeed's schedulers")
SCHEDULER_MIN_LR = (0.0001, "the default of WarmupCosineLR")
SET_BY: dict[str, str] = {
    "precision": "*.enabled", "optim.clip": "gradient_clipping", "optim.schedule": "scheduler.*",
    "optim.warmup": "scheduler.*", "optim.min_lr": "scheduler.*", "optim.betas": "optimizer.*",
    "optim.weight_decay": "optimizer.*", "optim.lr": "*.params.*lr", "optim.momentum": "optimizer.*",
}  # fmt: skip
"""The settings behind a default, which does not apply if they are `auto`."""


def _defaults(settings: Settings) -> dict[str, tuple[Any, str]]:
    automatic = [key for key, value in settings.items() if value == "auto"]
    defaults = dict(DEFAULTS)
    scheduler, optimizer = (str(settings.get(f"{part}.type")).lower() for part in ("scheduler", "optimizer"))
    if _schedule_sets_the_rate(settings):
        defaults["optim.lr"] = (DEFAULT_RATE, "the default of WarmupDecayLR's warmup_max_lr")
    elif isinstance(OPTIMIZERS.get(optimizer), dict) and optimizer not in ("adafactor", "muon"):
        defaults["optim.lr"] = (DEFAULT_RATE, "the default of the optimizer")
    if optimizer == "sgd":
        defaults["optim.momentum"] = (0.0, "the default of torch.optim.SGD")
    if settings.is_on("optimizer.params.torch_adam"):
        defaults["optim.weight_decay"] = (0.01, "the default of torch.optim.AdamW")
    if scheduler.startswith("warmup"):
        defaults["optim.warmup"] = SCHEDULER_WARMUP
    if scheduler == "warmupcosinelr":
        defaults["optim.min_lr"] = SCHEDULER_MIN_LR
    return {name: default for name, default in defaults.items() if not fnmatch.filter(automatic, SET_BY[name])}


DEEPSPEED = SourceFormat(
    "deepspeed", "a DeepSpeed config", read, detect, DS_TABLE,
    defaults=_defaults,
    missing={
        "model": "the config does not name a model; add model=hf:PATH or model.shape=…",
        "data.source": "the config does not name data; add data.source=…, else Weft reads pydoc",
        "train.steps": "the config does not say how long to train; add train.steps=…",
    },
)  # fmt: skip
