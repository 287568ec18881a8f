"""Megatron-LM's arguments of training, checkpoints and data."""

from __future__ import annotations

from typing import Any

from weft.extensions.convert.settings import (
    Result,
    Rule,
    Settings,
    absent,
    as_number,
    choice,
    keep_newest,
    switch,
    to,
    unneeded,
)

LAUNCH = unneeded("the launcher sets it: torchrun, weft train --nproc, weft launch")
LOGS = unneeded("metrics of all ranks are in RUN/metrics.jsonl")
STORE = "build a token store by weft data build and set data.source to its folder"


def _evaluation(job_field: str) -> Rule:
    """--eval-iters 0 turns evaluation off."""

    def rule(value: Any, settings: Settings) -> Result:
        off = as_number(settings.get("eval-iters")) == 0
        return Result({"train.eval_every": 0}) if off else to(job_field)(value, settings)

    return rule


def _steps(settings: Settings) -> float:
    if steps := settings.number("train-iters", default=0):
        return steps
    return settings.number("train-samples", default=0) // max(1, settings.number("global-batch-size"))


def _fraction(job_field: str, of: str = "") -> Rule:
    """Iterations or samples of a schedule, as steps."""

    def rule(value: Any, settings: Settings) -> Result:
        steps = (as_number(value) or 0) // (max(1, settings.number("global-batch-size")) if of == "samples" else 1)
        return Result({job_field: int(steps)})

    return rule


def _samples(value: Any, settings: Settings) -> Result:
    return Result({"train.steps": int(_steps(settings))}, "samples / global batch")


def _decay_end(value: Any, settings: Settings) -> Result:
    steps, total = as_number(value), _steps(settings)
    if steps == total or not total:
        return Result(note="the schedule ends at train.steps", status="not needed")
    return Result(note=f"Weft's schedule ends at train.steps={total:g}, not at {steps}", status="no counterpart")


def _wsd_decay(value: Any, settings: Settings) -> Result:
    total = _steps(settings)
    return Result({"optim.decay": min(1.0, (as_number(value) or 0) / total)} if total else {})


def _decay_style(value: Any, settings: Settings) -> Result:
    if str(value).lower() == "wsd" and "lr-wsd-decay-style" not in settings:
        return Result({"optim.schedule": "wsd"}, "Weft's wsd decays linearly, Megatron's exponentially", "partly")
    return choice({
        **{name: {"optim.schedule": name} for name in ("cosine", "linear", "constant", "wsd")},
        "inverse-square-root": "Weft has constant, linear, cosine and wsd",
    })(value, settings)  # fmt: skip


def _min_lr(value: Any, settings: Settings) -> Result:
    peak = settings.number("lr", default=0)
    lowest = as_number(value) or 0
    return Result({"optim.min_lr": min(1.0, lowest / peak) if peak else 0.0}, "as a fraction of lr")


def _betas(value: Any, settings: Settings) -> Result:
    first, second = settings.number("adam-beta1", default=0.9), settings.number("adam-beta2", default=0.999)
    return Result({"optim.betas": [first, second]})


def _recompute_granularity(value: Any, settings: Settings) -> Result:
    if value == "full" and settings.get("recompute-method") == "block":
        return Result({"memory.recompute": int(settings.number("recompute-num-layers"))}, "blocks of each stage")
    return choice({"full": {"memory.recompute": "full"}, "selective": {"memory.recompute": "selective"}})(
        value, settings
    )


def _retained(value: Any, settings: Settings) -> Result:
    return Result({"checkpoint.keep_every": int(value), "checkpoint.keep": 1}, "and the newest")


def _ramp(value: Any, settings: Settings) -> Result:
    start, increment, samples = (int(float(item)) for item in value)
    last = int(settings.number("global-batch-size"))
    sizes = list(range(start, last, max(1, increment)))
    stages, step = [], 0
    for size in sizes:
        step += max(1, samples // max(1, len(sizes)) // size)
        stages.append([step, size])
    return Result({"train.batch_ramp": stages, "train.global_batch": last}, "steps of equal numbers of samples")


def _split(value: Any, settings: Settings) -> Result:
    parts = [float(part) for part in str(value).split(",")]
    return Result(
        {"data.val_fraction": round(sum(parts[1:]) / max(1e-9, sum(parts)), 6)}, "validation and test together"
    )


def _global_batch(value: Any, settings: Settings) -> Result:
    return to("train.global_batch")(value, settings)


def _micro_batch(value: Any, settings: Settings) -> Result:
    if settings.number("global-batch-size", default=0):
        return to("train.microbatch")(value, settings)
    ranks = settings.ranks or 1
    for axis in ("tensor", "pipeline", "expert-tensor"):
        ranks = max(1, ranks // int(settings.number(f"{axis}-model-parallel-size")))
    ranks = max(1, ranks // int(settings.number("context-parallel-size")))
    micro = int(as_number(value) or 1)
    return Result({"train.microbatch": micro, "train.global_batch": micro * ranks}, f"{micro} a device × {ranks} ranks")


def _data_path(value: Any, settings: Settings) -> Result:
    return Result(note=STORE, status="no counterpart")


def _nodes(value: Any, settings: Settings) -> Result:
    return to("cluster.nodes")(value, settings)


TRAINING_RULES: dict[str, Rule] = {
    "micro-batch-size": _micro_batch,
    "global-batch-size": _global_batch,
    "rampup-batch-size": _ramp,
    "train-iters": to("train.steps"),
    "train-samples": _samples,
    "lr": to("optim.lr"),
    "min-lr": _min_lr,
    "lr-decay-style": _decay_style,
    "lr-decay-iters": _decay_end,
    "lr-decay-samples": lambda value, s: _decay_end(
        (as_number(value) or 0) // max(1, s.number("global-batch-size")), s
    ),
    "lr-warmup-iters": _fraction("optim.warmup"),
    "lr-warmup-samples": _fraction("optim.warmup", "samples"),
    "lr-warmup-fraction": to("optim.warmup"),
    "lr-warmup-init": absent("Weft's warm-up starts from 0"),
    "lr-wsd-decay-iters": _wsd_decay,
    "lr-wsd-decay-style": choice(
        {"linear": {}, "cosine": "Weft's wsd is linear", "exponential": "Weft's wsd is linear"}
    ),
    "weight-decay": to("optim.weight_decay"),
    "start-weight-decay": absent("weight decay is constant"),
    "end-weight-decay": absent("weight decay is constant"),
    "weight-decay-incr-style": choice({"constant": {}}),
    "adam-beta1": _betas,
    "adam-beta2": _betas,
    "adam-eps": to("optim.eps"),
    "sgd-momentum": to("optim.momentum"),
    "clip-grad": to("optim.clip"),
    "optimizer": choice(
        {
            "adam": {"optim.name": "adamw"},
            "sgd": {"optim.name": "sgd"},
            "muon": {"optim.name": "muon"},
            "dist_muon": {"optim.name": "muon"},
        }
    ),
    "optimizer-cpu-offload": switch({"memory.offload": "states"}),
    "optimizer-offload-fraction": to("memory.offload_fraction"),
    "cpu-offloading": switch({"memory.offload": "activations"}),
    "cpu-offloading-num-layers": absent("memory.offload: activations moves those of every block"),
    "use-precision-aware-optimizer": unneeded("memory.states says how moments are stored"),
    "exp-avg-dtype": choice({"fp32": {}, "bf16": {"memory.states": "bf16"}, "fp8": {"memory.states": "8bit"}}),
    "exp-avg-sq-dtype": choice({"fp32": {}, "bf16": {"memory.states": "bf16"}, "fp8": {"memory.states": "8bit"}}),
    "main-params-dtype": absent("master weights are fp32"),
    "bf16": switch({"precision": "bf16"}),
    "fp16": switch({"precision": "fp16"}),
    "fp8-format": switch({"precision": "fp8", "fp8.head": False}),
    "fp8-recipe": choice(
        {
            "tensorwise": {"fp8.scaling": "tensorwise", "fp8.amax": "dynamic"},
            "delayed": {"fp8.amax": "delayed"},
            "blockwise": "Weft has tensorwise and rowwise scales",
            "mxfp8": "Weft has tensorwise and rowwise scales",
        }
    ),
    "fp8-amax-history-len": to("fp8.history"),
    "fp8-amax-compute-algo": unneeded("the maximum of the history"),
    "fp8-param-gather": absent("set comm.compression=int8 to gather fewer bytes"),
    "fp8-*": absent("see the section fp8 of a job"),
    **dict.fromkeys(
        ("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"),
        unneeded("Weft scales the loss dynamically in fp16"),
    ),
    "accumulate-allreduce-grads-in-fp32": unneeded("gradients are summed in fp32"),
    "grad-reduce-in-bf16": switch({"comm.compression": "bf16"}),
    "recompute-granularity": _recompute_granularity,
    "recompute-method": unneeded("see --recompute-granularity"),
    "recompute-num-layers": unneeded("see --recompute-granularity"),
    "recompute-modules": unneeded("selective saves outputs of matrix products and attention"),
    "checkpoint-activations": switch({"memory.recompute": "full"}),
    "muon-*": absent("optim.lr, optim.momentum and optim.weight_decay are muon's"),
    "main-grads-dtype": absent("gradients are accumulated in fp32"),
    "calculate-per-token-loss": unneeded("the loss is a sum over valid targets divided by their number"),
    "data-impl": unneeded("token stores are mapped into memory"),
    "lora-*": absent("set model.lora: {rank, alpha, targets}"),
    "freeze-*": absent("model.frozen is for modules of your own"),
    "ema-decay": to("train.ema"),
    "recompute-activations": switch({"memory.recompute": "selective"}),
    "distribute-saved-activations": unneeded("tp splits saved activations (parallel.sequence)"),
    "seed": to("train.seed"),
    "save-interval": to("checkpoint.every"),
    "save-retain-interval": _retained,
    "most-recent-k": keep_newest,
    "save": unneeded("checkpoints are in RUN/checkpoints"),
    "load": unneeded("a run that is started again resumes by itself"),
    **dict.fromkeys(
        ("ckpt-format", "use-dist-ckpt", "dist-ckpt-*", "ckpt-*", "auto-detect-ckpt-format"),
        unneeded("a checkpoint opens in every layout"),
    ),
    "async-save": switch({"checkpoint.background": True}),
    "no-save-optim": absent("a checkpoint holds the optimizer"),
    "no-load-*": absent("a checkpoint is loaded whole"),
    "no-save-rng": unneeded("random numbers depend on seed and step"),
    "finetune": absent("model: hf:PATH starts from published weights"),
    "pretrained-checkpoint": absent("model: hf:PATH starts from published weights"),
    "use-checkpoint-args": absent("the job has all settings"),
    "override-opt-param-scheduler": unneeded("the job decides"),
    "use-checkpoint-opt-param-scheduler": unneeded("the job decides"),
    "eval-interval": _evaluation("train.eval_every"),
    "eval-iters": _evaluation("train.eval_batches"),
    "log-interval": to("watch.every"),
    "tensorboard-dir": switch({"watch.trackers": ["tensorboard"]}),
    "wandb-project": switch({"watch.trackers": ["wandb"]}),
    "wandb-*": unneeded("wandb's environment variables set it"),
    **dict.fromkeys(
        (
            "log-*",
            "tensorboard-*",
            "timing-log-*",
            "no-log-*",
            "barrier-with-L1-time",
            "logging-level",
            "no-barrier-with-level-1-timing",
            "config-logger-dir",
            "no-one-logger",
            "enable-one-logger",
        ),
        LOGS,
    ),
    "profile": switch({"watch.trace": {"at": 10, "steps": 3}}),
    "profile-step-start": lambda value, s: Result({"watch.trace.at": max(1, int(as_number(value) or 1))}),
    "profile-*": unneeded("traces hold all ranks"),
    "use-pytorch-profiler": unneeded("traces hold all ranks"),
    **dict.fromkeys(
        (
            "data-path",
            "train-data-path",
            "valid-data-path",
            "data-args-path",
            "test-data-path",
            "per-split-data-args-path",
        ),
        _data_path,
    ),
    "split": _split,
    "data-cache-path": unneeded("a token store needs no cache"),
    "mock-data": switch({"data.source": "synthetic"}),
    "dataloader-type": unneeded("samples are shuffled; their order depends on train.seed"),
    "num-workers": unneeded("Weft's loader reads ahead (data.prefetch)"),
    "num-dataset-builder-threads": unneeded("weft data build uses all cores"),
    "no-mmap-bin-files": unneeded("token stores are memory-mapped"),
    "no-create-attention-mask-in-dataloader": unneeded("masks are made on the device"),
    **dict.fromkeys(
        ("reset-position-ids", "reset-attention-mask", "eod-mask-loss"), switch({"data.mask_documents": True})
    ),
    "tokenizer-type": choice(
        {
            "nulltokenizer": {},
            **dict.fromkeys(
                (
                    "gpt2bpetokenizer",
                    "sentencepiecetokenizer",
                    "gptsentencepiecetokenizer",
                    "huggingfacetokenizer",
                    "llama2tokenizer",
                    "tiktokentokenizer",
                    "bertwordpiecelowercase",
                ),
                "set data.tokenizer to a tokenizer.json; a token store has its own tokenizer",
            ),
        }
    ),
    **dict.fromkeys(
        ("tokenizer-model", "vocab-file", "merge-file"),
        absent("set data.tokenizer to a tokenizer.json; a token store has its own tokenizer"),
    ),
    "distributed-backend": choice({"nccl": {"comm.backend": "nccl"}, "gloo": {"comm.backend": "gloo"}}),
    "distributed-timeout-minutes": to("comm.timeout_s", lambda minutes: float(minutes) * 60),
    "exit-*": absent("a run takes train.steps steps; SIGTERM saves and ends it"),
    "manual-gc*": unneeded("the garbage collector runs between steps"),
    "empty-unused-memory-level": unneeded("the allocator keeps memory"),
    "check-for-nan-in-loss-and-grad": unneeded("non-finite steps are reported"),
    "no-check-for-nan-in-loss-and-grad": unneeded("non-finite steps are reported"),
    "rerun-mode": unneeded("replicas are compared (resilience.check_every)"),
    **dict.fromkeys(
        ("enable-cuda-graph", "cuda-graph-*", "external-cuda-graph"), absent("train.compile compiles each block")
    ),
    "deterministic-mode": unneeded("the samples of a run depend on the seed alone"),
    "nccl-communicator-config-path": absent("NCCL's variables"),
    "use-tp-pp-dp-mapping": absent("axes have one order"),
    "num-distributed-optimizer-instances": absent("parallel.dp_replicate × parallel.dp_shard is the counterpart"),
    "mtp-*": absent("multi-token prediction is not in Weft"),
    "data-parallel-random-init": absent("ranks start from the same weights"),
    **dict.fromkeys(
        ("lazy-mpu-init", "use-cpu-initialization", "no-initialization", "te-rng-tracker", "use-mp-args"), LAUNCH
    ),
    "nnodes": _nodes,
    "nproc_per_node": to("cluster.devices_per_node"),
    "nproc-per-node": to("cluster.devices_per_node"),
}
