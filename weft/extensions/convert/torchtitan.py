"""torchtitan's TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from weft.extensions.convert.conversion import SourceFormat
from weft.extensions.convert.settings import (
    Result,
    Rule,
    Settings,
    absent,
    as_number,
    choice,
    flatten,
    keep_newest,
    partly,
    switch,
    to,
    unneeded,
)
from weft.job.errors import JobError

FLAVORS: dict[tuple[str, str], str] = {
    ("llama3", "debugmodel"): "tiny", ("llama3", "1b"): "llama-1b", ("llama3", "3b"): "llama-3b",
    ("llama3", "8b"): "llama-8b", ("llama3", "70b"): "llama-70b", ("llama3", "405b"): "llama-405b",
    ("llama2", "7b"): "llama-7b", ("llama2", "13b"): "llama-13b", ("deepseek_v3", "debugmodel"): "moe-tiny",
    ("deepseek_v3", "16b"): "deepseek-v3-16b", ("deepseek_v3", "671b"): "deepseek-v3-671b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b",
}  # fmt: skip
PIPELINES: dict[str, dict[str, Any] | str] = {
    "1f1b": {"parallel.schedule": "1f1b"}, "gpipe": {"parallel.schedule": "gpipe"},
    "interleaved1f1b": {"parallel.schedule": "interleaved-1f1b"},
    "interleavedzerobubble": {"parallel.schedule": "zero-bubble"}, "zbvzerobubble": {"parallel.schedule": "zbv"},
    "dualpipev": {"parallel.schedule": "dualpipe-v"}, "loopedbfs": "Weft has interleaved-1f1b",
}  # fmt: skip
DECAYS: dict[str, dict[str, Any] | str] = {
    "linear": {"optim.schedule": "linear"}, "cosine": {"optim.schedule": "cosine"},
    "sqrt": "Weft decays linearly or by a cosine",
}  # fmt: skip
FLOAT8: dict[str, Any] = {"precision": "fp8", "fp8.amax": "dynamic", "fp8.head": False}
"""What torchtitan's float8 layers do; its head stays in bf16."""
LAYERS = {
    "attention.wq": "attn.q", "attention.wk": "attn.k", "attention.wv": "attn.v", "attention.wo": "attn.o",
    "feed_forward.w1": "mlp.gate", "feed_forward.w2": "mlp.down", "feed_forward.w3": "mlp.up",
    "attention": "attn", "feed_forward": "mlp", "layers.": "blocks.",
}  # fmt: skip
"""Names of layers, and Weft's."""
SAVES = "checkpoint.enable_checkpoint", "checkpoint.enable"
EVALUATES = "validation.enabled", "validation.enable", "validator.enable"
"""Switches of checkpoints and of evaluation in the releases of torchtitan; both are off by default."""
IN_PARALLEL = "parallelism", "training", "experimental"
"""Sections in which releases of torchtitan had the degrees."""


def _degree(settings: Settings, name: str) -> int:
    return max(1, int(settings.number(*(f"{section}.{name}" for section in IN_PARALLEL))))


def _flavor(value: Any, settings: Settings) -> Result:
    name, flavor = str(settings.get("model.name", "llama3")).lower(), str(value).lower()
    if (shape := FLAVORS.get((name, flavor))) is None:
        known = ", ".join(f"{n} {f}" for n, f in FLAVORS)
        return Result(note=f"shapes are known for {known}; write the model's fields", status="no counterpart")
    return Result({"model.shape": shape})


def _local_batch(value: Any, settings: Settings) -> Result:
    micro, whole = as_number(value), as_number(settings.get("training.global_batch_size"))
    if whole is not None and whole > 0:
        return Result({"train.microbatch": micro})
    splits = [_degree(settings, f"{axis}_parallel_degree") for axis in ("tensor", "context", "pipeline")]
    ranks = settings.ranks or 1
    for split in splits:
        ranks = max(1, ranks // split)
    return Result({"train.microbatch": micro, "train.global_batch": int((micro or 1) * ranks)},
                  f"{micro} a device × {ranks} data-parallel ranks")  # fmt: skip


def _global_batch(value: Any, settings: Settings) -> Result:
    if (whole := as_number(value)) is None or whole <= 0:
        return Result(note="local_batch_size decides", status="not needed")
    return Result({"train.global_batch": whole})


def _reshard(value: Any, settings: Settings) -> Result:
    if str(value) == "default":
        pipelined = _degree(settings, "pipeline_parallel_degree") > 1
        return Result({"parallel.zero": 2 if pipelined else 3}, "default: always, without pipeline")
    return choice({"always": {"parallel.zero": 3}, "never": {"parallel.zero": 2}})(value, settings)


def _recompute(value: Any, settings: Settings) -> Result:
    option = as_number(settings.get("activation_checkpoint.selective_ac_option"))
    if str(value) == "selective" and option is not None and option > 1:
        return Result({"memory.recompute": "selective"}, "Weft's selective recompute is by operation", "partly")
    return choice({"none": {"memory.recompute": "none"}, "full": {"memory.recompute": "full"},
                   "selective": {"memory.recompute": "selective"},
                   "memory_budget": {"memory.recompute": "auto"}})(value, settings)  # fmt: skip


def every(job_field: str, *enabled: str) -> Rule:
    """Steps between two events, which happen only where one of the settings `enabled` is on."""

    def rule(value: Any, settings: Settings) -> Result:
        if not settings.is_on(*enabled):
            given = [key for key in enabled if key in settings]
            return Result(note=f"{given[0]} is off" if given else f"{enabled[-1]} is not on", status="not needed")
        return to(job_field)(value, settings)

    return rule


def _validation_steps(value: Any, settings: Settings) -> Result:
    if as_number(value) == -1 and settings.is_on(*EVALUATES):
        return Result({"train.eval_batches": 10**9}, "the whole held-out data")
    return every("train.eval_batches", *EVALUATES)(value, settings)


def _skipped(names: Any) -> list[str]:
    """Patterns of the layers that stay in bf16; the head does anyway, and "auto_filter_small_kn" is no name."""
    found = []
    for name in names:
        for theirs, ours in LAYERS.items():
            name = name.replace(theirs, ours)
        found += [] if name in ("output", "auto_filter_small_kn") else [f"*{name}*"]
    return found


def _mixed(value: Any, settings: Settings) -> Result:
    return choice({"bfloat16": {"precision": "bf16"}, "float32": {"precision": "fp32"}})(value, settings)


def _decay_ratio(value: Any, settings: Settings) -> Result:
    if (share := as_number(value)) is None:
        return Result(note="empty", status="not needed")
    return Result({"optim.decay": share, "optim.schedule": "wsd"} if share < 1 else {"optim.decay": 1.0})


def _decay_type(value: Any, settings: Settings) -> Result:
    """Without decay_ratio the rate falls from the end of the warm-up on."""
    share = as_number(settings.get("lr_scheduler.decay_ratio"))
    if value == "linear" and share is not None and share < 1:
        return Result({"optim.schedule": "wsd"})
    return choice(DECAYS)(value, settings)


DEGREES: dict[str, Rule] = {
    "data_parallel_replicate_degree": to("parallel.dp_replicate"),
    "data_parallel_shard_degree": to("parallel.dp_shard"),
    "data_parallel_degree": to("parallel.dp_shard"),
    "fsdp_reshard_after_forward": _reshard,
    "tensor_parallel_degree": to("parallel.tp"),
    "enable_async_tensor_parallel": absent("collectives of tp are not split by tile"),
    "disable_loss_parallel": unneeded("the loss is computed on shards of the vocabulary"),
    "context_parallel_degree": to("parallel.cp"),
    "context_parallel_rotate_method": unneeded("parallel.cp_style chooses"),
    "pipeline_parallel_degree": to("parallel.pp"),
    "pipeline_parallel_schedule": choice(PIPELINES),
    "pipeline_parallel_schedule_csv": absent("schedules are named; docs/pipeline.md"),
    "pipeline_parallel_microbatch_size": to("train.microbatch"),
    "pipeline_parallel_microbatches": to("parallel.microbatches"),
    "pipeline_parallel_layers_per_stage": absent("set parallel.virtual_stages"),
    "pipeline_parallel_*": unneeded("Weft splits layers by their cost; parallel.split overrides it"),
    "module_fqns_per_model_part": absent("set parallel.split"),
    "expert_parallel_degree": to("parallel.ep"),
    "expert_tensor_parallel_degree": absent("experts are split over ep"),
    "expert_parallel_comm_backend": unneeded("parallel.ep_exchange chooses"),
    "enable_compiled_autograd": absent("the backward pass is torch's own"),
}  # fmt: skip

TABLE: dict[str, Rule] = {
    **{f"{section}.{key}": rule for section in IN_PARALLEL for key, rule in DEGREES.items()},
    "job.description": unneeded("a comment"),
    "job.dump_folder": unneeded("files are in runs/NAME; runs_dir changes the folder"),
    "job.config_file": unneeded("a comment"),
    "job.print_config": unneeded("RUN/job.yaml holds the settings"),
    "job.print_args": unneeded("RUN/job.yaml holds the settings"),
    "job.save_config_file": unneeded("RUN/job.yaml holds the settings"),
    "job.custom_config_module": absent("extensions register models and optimizers"),
    "job.use_for_integration_test": unneeded("torchtitan's own tests"),
    "profiling.enable_profiling": switch({"watch.trace": {"at": 10, "steps": 3}}, note="a trace of all ranks"),
    "profiling.profile_freq": absent("watch.trace has one range of steps"),
    "profiling.enable_memory_snapshot": absent("weft plan JOB --explain memory"),
    "profiling.*": unneeded("traces are in RUN/traces"),
    "metrics.log_freq": to("watch.every"),
    "metrics.enable_tensorboard": switch({"watch.trackers": ["tensorboard"]}),
    "metrics.enable_wandb": switch({"watch.trackers": ["wandb"]}),
    "metrics.*": unneeded("metrics of all ranks are in RUN/metrics.jsonl"),
    "model.name": unneeded("with the flavor, the shape"),
    "model.flavor": _flavor,
    "model.hf_assets_path": partly(to("data.tokenizer", lambda path: f"{path}/tokenizer.json"), "its tokenizer"),
    "model.tokenizer_path": to("data.tokenizer", str),
    "model.norm_type": choice({"rmsnorm": {"model.norm": "rmsnorm"}, "layernorm": {"model.norm": "layernorm"}}),
    "model.converters": absent("precision: fp8 is the counterpart of float8"),
    "model.print_after_conversion": unneeded("weft plan JOB shows the model"),
    "model.tokenizer_type": unneeded("tokenizer.json is used"),
    "optimizer.name": choice(
        {
            "adamw": {"optim.name": "adamw"},
            "adam": {"optim.name": "adamw"},
            "sgd": {"optim.name": "sgd"},
            "muon": {"optim.name": "muon"},
        }
    ),
    "optimizer.lr": to("optim.lr"),
    "optimizer.eps": to("optim.eps"),
    "optimizer.weight_decay": to("optim.weight_decay"),
    "optimizer.beta1": lambda value, s: Result(
        {"optim.betas": [as_number(value), s.number("optimizer.beta2", default=0.95)]}
    ),
    "optimizer.beta2": lambda value, s: Result(
        {"optim.betas": [s.number("optimizer.beta1", default=0.9), as_number(value)]}
    ),
    "optimizer.implementation": unneeded("the implementation does not change the update"),
    "optimizer.fused": unneeded("the implementation does not change the update"),
    "optimizer.early_step_in_backward": absent("gradients are clipped before the step"),
    "lr_scheduler.warmup_steps": to("optim.warmup"),
    "training.warmup_steps": to("optim.warmup"),
    "lr_scheduler.decay_type": _decay_type,
    "lr_scheduler.decay_ratio": _decay_ratio,
    "lr_scheduler.min_lr_factor": to("optim.min_lr"),
    "lr_scheduler.lr_min": to("optim.min_lr"),
    "lr_scheduler.total_steps": absent("the schedule ends at train.steps"),
    "training.batch_size": _local_batch,
    "training.local_batch_size": _local_batch,
    "training.global_batch_size": _global_batch,
    "training.seq_len": to("data.seq_len"),
    "training.max_norm": to("optim.clip"),
    "training.steps": to("train.steps"),
    "training.seed": to("train.seed"),
    "debug.seed": to("train.seed"),
    "training.dataset": absent("build a token store by weft data build and set data.source to its folder"),
    "training.dataset_path": absent("build a token store by weft data build and set data.source to its folder"),
    "training.mixed_precision_param": _mixed,
    "training.mixed_precision_reduce": unneeded("gradients are summed in fp32"),
    "training.dtype": choice({"float32": {}, "bfloat16": "master weights are fp32"}),
    "training.compile": switch({"train.compile": True}),
    "training.enable_cpu_offload": partly(switch({"memory.offload": "states"}), "compute weights stay on the device"),
    "training.deterministic": unneeded("the samples of a run depend on the seed alone"),
    "training.gc_freq": unneeded("the garbage collector runs between steps"),
    "training.gc_debug": unneeded("the garbage collector runs between steps"),
    "training.fp8_linear": switch(FLOAT8),
    "compile.enable": switch({"train.compile": True}, {"train.compile": False}),
    "compile.*": absent("Weft compiles each block with inductor"),
    "activation_checkpoint.mode": _recompute,
    "activation_checkpoint.selective_ac_option": unneeded("Weft saves outputs of matrix products and attention"),
    "activation_checkpoint.*": unneeded("Weft saves outputs of matrix products and attention"),
    "float8.enable_float8_linear": switch(FLOAT8),
    "float8.recipe_name": choice(
        {
            "tensorwise": {**FLOAT8, "fp8.scaling": "tensorwise"},
            "rowwise": {**FLOAT8, "fp8.scaling": "rowwise"},
            "rowwise_with_gw_hp": "Weft has tensorwise and rowwise",
        }
    ),
    "quantize.linear.float8.recipe_name": choice(
        {
            "tensorwise": {**FLOAT8, "fp8.scaling": "tensorwise"},
            "rowwise": {**FLOAT8, "fp8.scaling": "rowwise"},
        }
    ),
    "float8.enable_fsdp_float8_all_gather": absent("set comm.compression=int8 to gather fewer bytes"),
    "quantize.*.enable_fsdp_float8_all_gather": absent("set comm.compression=int8 to gather fewer bytes"),
    "float8.filter_fqns": to("fp8.skip", _skipped),
    "quantize.linear.float8.filter_fqns": to("fp8.skip", _skipped),
    "float8.*": unneeded("Weft's fp8 kernels do so"),
    "quantize.*": absent("precision: fp8 has tensorwise and rowwise scales"),
    "mx.*": absent("precision: fp8 has tensorwise and rowwise scales"),
    "checkpoint.enable_checkpoint": switch({}, {"checkpoint.every": 0}),
    "checkpoint.enable": switch({}, {"checkpoint.every": 0}),
    "checkpoint.interval": every("checkpoint.every", *SAVES),
    "checkpoint.interval_type": choice({"steps": {}, "seconds": "checkpoint.every counts steps"}),
    "checkpoint.keep_latest_k": keep_newest,
    "checkpoint.async_mode": switch({"checkpoint.background": True}),
    "checkpoint.initial_load_in_hf": absent("model: hf:PATH starts from published weights"),
    "checkpoint.initial_load_path": absent("model: hf:PATH starts from published weights"),
    "checkpoint.folder": unneeded("checkpoints are in RUN/checkpoints"),
    "checkpoint.*": unneeded("weft export RUN writes weights of any checkpoint"),
    "comm.init_timeout_seconds": unneeded("ranks wait for each other at the start"),
    "comm.train_timeout_seconds": to("comm.timeout_s"),
    "comm.*": unneeded("a hang is reported with the ranks that did not arrive"),
    "memory_estimation.*": unneeded("weft plan JOB predicts memory"),
    "fault_tolerance.*": unneeded("runs recover from lost ranks by themselves"),
    "validation.enable": switch({}, {"train.eval_every": 0}),
    "validation.enabled": switch({}, {"train.eval_every": 0}),
    "validation.freq": every("train.eval_every", *EVALUATES),
    "validation.steps": _validation_steps,
    "validation.seq_len": absent("evaluation has the sequence length of training"),
    "validation.local_batch_size": unneeded("evaluation uses train.microbatch"),
    "validation.*": absent("data.val_fraction holds out the end of the corpus"),
    "experimental.*": absent("extensions register models and optimizers"),
    "debug.*": unneeded("weft prove JOB compares layouts"),
}


def read(text: str, file: str) -> Settings:
    try:
        return flatten(value) if (value := tomllib.loads(text)) else Settings()
    except ValueError as error:  # also a number with more digits than Python reads
        raise JobError(f"{file} is not TOML: {error}") from None
    except RecursionError:
        raise JobError(f"{file} is nested too deeply") from None


def detect(text: str, path: Path) -> bool:
    return path.suffix == ".toml" or any(line.strip() in ("[training]", "[job]") for line in text.splitlines())


def torchtitan_defaults(settings: Settings) -> dict[str, tuple[Any, str]]:
    """Defaults of torchtitan where Weft has others, or where later versions of Weft might have."""
    said, saves, evaluates = "torchtitan's default", settings.is_on(*SAVES), settings.is_on(*EVALUATES)
    batch = _local_batch(8, settings).job
    given = {"training.batch_size", "training.local_batch_size", "training.num_tokens_per_microbatch_per_dp_rank"}
    return ({} if given & settings.keys() else {name: (value, said) for name, value in batch.items()}) | {
        "precision": ("bf16", "torchtitan's default of mixed_precision_param"),
        "optim.lr": (8e-4, said), "optim.betas": ([0.9, 0.95], said), "optim.weight_decay": (0.1, said),
        "optim.clip": (1.0, said), "optim.warmup": (200, said),
        "optim.schedule": ("linear", "torchtitan's default of decay_type"),
        "optim.min_lr": (0.0, "torchtitan's default of min_lr_factor"),
        "train.steps": (10000, said), "data.seq_len": (2048, said), "memory.recompute": ("selective", said),
        "train.compile": (False, said), "checkpoint.keep": (10, "torchtitan's default of keep_latest_k"),
        "watch.every": (10, said), "comm.timeout_s": (100, said),
        "checkpoint.every": (500, said) if saves else (0, "checkpoints are off by default"),
        "train.eval_every": (10, said) if evaluates else (0, "validation is off by default"),
    }  # fmt: skip


TORCHTITAN = SourceFormat(
    "torchtitan", "a torchtitan config", read, detect, TABLE, defaults=torchtitan_defaults,
    missing={
        "model": "no known model.flavor; add model.shape=… or the model's fields",
        "data.source": "add data.source=FOLDER, a token store made by weft data build, else Weft reads pydoc",
    },
)  # fmt: skip
