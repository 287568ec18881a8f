"""Megatron-LM's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.extensions.convert.conversion import SourceFormat
from weft.extensions.convert.megatron_formats.megatron_command import LAUNCHERS, arguments_of
from weft.extensions.convert.megatron_formats.megatron_layout import LAYOUT_RULES
from weft.extensions.convert.megatron_formats.megatron_model import MODEL_RULES
from weft.extensions.convert.megatron_formats.megatron_other import OTHER_RULES
from weft.extensions.convert.megatron_formats.megatron_training import LAUNCH, TRAINING_RULES
from weft.extensions.convert.settings import KEEP_ALL, Result, Rule, Settings


def _unresolved(rule: Rule) -> Rule:
    """A value such as $1 comes from outside the script."""

    def checked(value: Any, settings: Settings) -> Result:
        unset = [item for item in (value if isinstance(value, list) else [value]) if "$" in str(item)]
        if not unset:
            return rule(value, settings)
        needed = Result(note=f"{unset[0]} is not set in the file", status="no counterpart")
        try:
            found = rule(value, settings)
        except (TypeError, ValueError):
            return needed
        return needed if found.job else found

    return checked


_LAUNCHER = {name: LAUNCH for name in LAUNCHERS if name not in TRAINING_RULES}

TABLE: dict[str, Rule] = {
    key: _unresolved(rule)
    for key, rule in (MODEL_RULES | LAYOUT_RULES | TRAINING_RULES | _LAUNCHER | OTHER_RULES).items()
}


def _ranks(settings: Settings) -> int | None:
    local = settings.number("nproc_per_node", "nproc-per-node", default=0)
    return int(local * settings.number("nnodes")) or None


def _defaults(settings: Settings) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {
        "model.family": ("llama" if settings.is_on("swiglu") else "gpt2", "by --swiglu"),
        "precision": ("fp32", "neither --bf16 nor --fp16"),
        "optim.betas": ([0.9, 0.999], "Megatron's default"), "optim.weight_decay": (0.01, "Megatron's default"),
        "optim.schedule": ("linear", "Megatron's default"), "optim.warmup": (0, "Megatron's default"),
        "optim.min_lr": (0.0, "Megatron's default"), "train.seed": (1234, "Megatron's default"),
        "model.norm": ("layernorm", "Megatron's default"), "model.tied": (True, "Megatron's default"),
        "model.bias": (True, "Megatron's default"), "model.dropout": (0.1, "Megatron's default"),
        "model.positions": ("learned", "Megatron's default"), "model.activation": ("gelu", "Megatron's default"),
        "model.norm_eps": (1e-5, "Megatron's default"), "optim.clip": (1.0, "Megatron's default"),
        "comm.timeout_s": (600, "Megatron's default"),
        "parallel.sequence": (False, "--sequence-parallel is off"),
        "parallel.dp_replicate": (-1, "--use-distributed-optimizer is off"),
        "parallel.dp_shard": (1, "--use-distributed-optimizer is off"),
        "checkpoint.every": (0, "--save-interval is not given"),
        "checkpoint.keep": (KEEP_ALL, "Megatron keeps every checkpoint"),
        "train.eval_every": (0, "--eval-interval is not given"), "train.eval_batches": (100, "Megatron's default"),
        "watch.every": (100, "Megatron's default"),
    }  # fmt: skip
    sharded = ("use-distributed-optimizer", "use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp")
    if settings.is_on(*sharded):
        del found["parallel.dp_replicate"], found["parallel.dp_shard"]
    if settings.get("position-embedding-type") in ("rope", "yarn") or settings.is_on("use-rotary-position-embeddings"):
        found["model.rope_theta"] = (10000, "Megatron's default")
    if width := int(settings.number("hidden-size", default=0)):
        ffn = int(4 * width * 2 / 3 / 64) * 64 if settings.is_on("swiglu") else 4 * width
        found["model.ffn"] = (ffn, "Megatron's default")
    if not {"num-layers", "hidden-size"} & settings.keys():
        found = {key: value for key, value in found.items() if not key.startswith("model.")}
    return found


def detect(text: str, path: Path) -> bool:
    names = ("--num-layers", "--micro-batch-size", "--hidden-size", "--train-iters", "model-parallel-size")
    return any(name in text.replace("_", "-") for name in names)


MEGATRON = SourceFormat(
    "megatron", "a Megatron command line", arguments_of, detect, TABLE, _ranks, _defaults,
    missing={
        "model": "no --num-layers and --hidden-size; add model.shape=… or the model's fields",
        "data.source": "add data.source=FOLDER, a token store made by weft data build, else Weft reads pydoc",
        "train.steps": "no --train-iters; add train.steps=…",
    },
)  # fmt: skip
