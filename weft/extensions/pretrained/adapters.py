"""Low-rank adapters in files: written in the format of PEFT, or merged into the weights of their model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.extensions.pretrained.config import write_config
from weft.extensions.pretrained.family_entry import family_of
from weft.extensions.pretrained.tensor_forms import FORMS, FileTensor, file_tensors, named_shapes
from weft.job.errors import JobError
from weft.job.model_parts.lora_settings import Lora
from weft.job.schema import Model
from weft.models.build_model import build_model
from weft.training.weight_shards import save_tensors, write_json, write_shards

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"

Load = Callable[[str], Tensor]
"""Reads one whole parameter by name."""


def base_model(model: Model) -> Model:
    """The model without its adapters."""
    return model.model_copy(update={"lora": None})


def merged(name: str, lora: Lora, load: Load, held: set[str]) -> Tensor:
    """A parameter of the base model, with the product of its layer's adapter added if it has one."""
    layer, _, leaf = name.rpartition(".")
    value = load(name)
    if leaf != "weight" or f"{layer}.lora.a" not in held:
        return value
    return value.float() + lora.scale * (load(f"{layer}.lora.b").float() @ load(f"{layer}.lora.a").float())


def write_adapters(
    out: Path, model: Model, load: Load, held: set[str], *,
    original: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None, base: str, card: str,
) -> int:  # fmt: skip
    """Write the adapters of a model as a folder that PEFT loads; returns the bytes of the weights.

    `original` is the config of the base model. A tensor of the family's files that holds several layers, such as the
    queries, keys and values of Phi-3, gets one adapter with the ranks of all of them.
    """
    lora = model.lora
    assert lora is not None
    if model.experts is not None and any(".mlp." in name and ".lora." in name for name in held):
        raise JobError(
            "PEFT applies the adapters of gate, up and down to all experts, and this run adapts only layers that every "
            "token uses; --to hf would work"
        )
    bare = base_model(model)
    family = family_of(write_config(bare, original=original)["model_type"], labels=False)
    tensors = [
        t
        for t in file_tensors(family, bare, named_shapes(family, build_model(bare)).items())
        if any(f"{_layer(part.name)}.lora.a" in held and part.name.endswith(".weight") for part in t.parts)
    ]

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for tensor in tensors:
            a, b = _joined(tensor, lora, bare, load, held)
            for key, value in (("lora_A", a), ("lora_B", b)):
                yield f"base_model.model.{_module(tensor)}.{key}.weight", value.to(dtype or torch.float32).contiguous()

    out.mkdir(parents=True, exist_ok=True)
    size = write_shards(out, ADAPTER_FILE, pairs(), 2**63, save_tensors)
    write_json(out / ADAPTER_CONFIG, _config(tensors, lora, held, base))
    (out / "README.md").write_text(card, encoding="utf-8")
    return size


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _module(tensor: FileTensor) -> str:
    return tensor.name.removesuffix(".weight")


def _adapted(tensor: FileTensor, held: set[str]) -> list[str]:
    """The layers with an adapter that a tensor holds."""
    return [layer for part in tensor.parts if f"{(layer := _layer(part.name))}.lora.a" in held]


def _joined(tensor: FileTensor, lora: Lora, model: Model, load: Load, held: set[str]) -> tuple[Tensor, Tensor]:
    """A and B of a tensor: the A of its layers one below the other, and for each layer its B in their columns."""
    layers = _adapted(tensor, held)
    a = torch.cat([load(f"{layer}.lora.a").float() for layer in layers])
    parts = []
    for part in tensor.parts:
        wide = torch.zeros(part.shape[0], lora.rank * len(layers))
        if (layer := _layer(part.name)) in layers:
            first = layers.index(layer) * lora.rank
            wide[:, first : first + lora.rank] = load(f"{layer}.lora.b").float()
        parts.append(wide)
    b = tensor.form.join(parts, model)
    return a, b.t() if tensor.form is FORMS["columns"] else b


def _config(tensors: list[FileTensor], lora: Lora, held: set[str], base: str) -> dict[str, Any]:
    ranks = {_module(t): lora.rank * len(_adapted(t, held)) for t in tensors}
    last = {name: name.rpartition(".")[2] for name in ranks}
    targets = sorted(set(last.values()))
    fused = {last[name]: rank for name, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets,
        "rank_pattern": fused, "alpha_pattern": {name: lora.scale * rank for name, rank in fused.items()},
        "fan_in_fan_out": any(t.form is FORMS["columns"] for t in tensors), "bias": "none", "init_lora_weights": True,
        "use_rslora": False, "use_dora": False, "modules_to_save": None, "layers_to_transform": None,
    }  # fmt: skip
