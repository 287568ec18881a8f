"""Megatron-LM's arguments of layout, and of kernels and overlap that Weft needs no setting for."""

from __future__ import annotations

from typing import Any

from weft.extensions.convert.megatron_formats.megatron_model import KERNELS, OVERLAP
from weft.extensions.convert.settings import Result, Rule, Settings, absent, as_number, choice, switch, to, unneeded


def _virtual_stages(value: Any, settings: Settings) -> Result:
    layers, pp = settings.number("num-layers", default=0), settings.number("pipeline-model-parallel-size")
    stages = int(layers // (pp * max(1, as_number(value) or 1))) if layers else 1
    return Result({"parallel.schedule": "interleaved-1f1b", "parallel.virtual_stages": max(1, stages)})


def _rank_stages(value: Any, settings: Settings) -> Result:
    return Result({"parallel.schedule": "interleaved-1f1b", "parallel.virtual_stages": as_number(value)})


LAYOUT_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "no-masked-softmax-fusion",
            "no-bias-gelu-fusion",
            "no-bias-swiglu-fusion",
            "no-bias-dropout-fusion",
            "no-rope-fusion",
            "no-gradient-accumulation-fusion",
            "no-persist-layer-norm",
            "cross-entropy-loss-fusion",
            "cross-entropy-fusion-impl",
            "use-flash-attn",
            "attention-backend",
            "transformer-impl",
            "use-mcore-models",
            "use-legacy-models",
            "no-*-fusion",
        ),
        KERNELS,
    ),
    "tensor-model-parallel-size": to("parallel.tp"),
    "pipeline-model-parallel-size": to("parallel.pp"),
    "context-parallel-size": to("parallel.cp"),
    "expert-model-parallel-size": to("parallel.ep"),
    "expert-tensor-parallel-size": absent("experts are split over ep"),
    "account-for-*-in-pipeline-split": unneeded("stages are split by their cost, embedding and loss included"),
    "hybrid-context-parallel": absent("parallel.cp splits every sequence"),
    "torch-fsdp2-reshard-after-forward": unneeded("parallel.zero=3 gathers again in the backward pass"),
    "microbatch-group-size-per-virtual-pipeline-stage": absent("interleaved schedules take pp microbatches at a time"),
    "cp-comm-type": choice(
        {
            "p2p": {"parallel.cp_style": "ring"},
            "a2a": {"parallel.cp_style": "ulysses"},
            "a2a+p2p": {"parallel.cp_style": "hybrid"},
            "allgather": "Weft has ring and ulysses",
        }
    ),
    "sequence-parallel": switch({"parallel.sequence": True}),
    "use-distributed-optimizer": switch({"parallel.zero": 1, "parallel.dp_shard": -1}),
    "data-parallel-sharding-strategy": choice(
        {
            "no_shard": {"parallel.dp_replicate": -1, "parallel.dp_shard": 1},
            "optim": {"parallel.zero": 1},
            "optim_grads": {"parallel.zero": 2},
            "optim_grads_params": {"parallel.zero": 3},
        }
    ),
    "use-megatron-fsdp": switch({"parallel.dp_shard": -1}),
    "use-custom-fsdp": switch({"parallel.dp_shard": -1}),
    "use-torch-fsdp2": switch({"parallel.dp_shard": -1, "parallel.zero": 3}),
    "num-layers-per-virtual-pipeline-stage": _virtual_stages,
    "num-virtual-stages-per-pipeline-rank": _rank_stages,
    **dict.fromkeys(
        ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "pipeline-model-parallel-layout"),
        absent("set parallel.split"),
    ),
    **dict.fromkeys(
        (
            "overlap-grad-reduce",
            "overlap-param-gather",
            "tp-comm-overlap",
            "overlap-p2p-communication",
            "overlap-p2p-comm",
            "delay-grad-reduce",
            "overlap-param-gather-with-optimizer-step",
            "align-*",
            "overlap-*",
            "no-async-tensor-model-parallel-allreduce",
            "tp-comm-*",
        ),
        OVERLAP,
    ),
    "delay-wgrad-compute": absent("parallel.schedule=zbv splits the backward pass"),
    "ddp-bucket-size": absent("comm.bucket_mb is in MB"),
    "ddp-num-buckets": absent("comm.bucket_mb is in MB"),
}
