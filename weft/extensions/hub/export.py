"""Writes a trained model of transformers as a checkpoint: its names, config, tokenizer and generation config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.extensions.hub.hub_weights import HubWeights
from weft.extensions.hub.model import build_hub_model, quiet
from weft.job.errors import JobError
from weft.job.schema import Model
from weft.pretrained.checkpoint_folder import CONFIG, SIDE_FILES, weight_files
from weft.pretrained.tensor_dtypes import FILE as DTYPES
from weft.pretrained.tensor_dtypes import read_dtypes
from weft.pretrained.writer import DTYPE_NAMES, copy_side_file, save_tensors, write_json, write_shards


def write_hub_folder(
    out: Path, model: Model, source: Callable[[list[str]], Mapping[str, Tensor]], buffers: Mapping[str, Tensor], *,
    dtype: torch.dtype | None, shard_bytes: int, folder: Path | None, tokenizer: Path | None, card: str,
) -> int:  # fmt: skip
    """Write a model in the names of transformers; returns the bytes of the weights. Tensors have the names and, without
    `dtype`, the dtypes of the files in `folder`, which the model was made from."""
    module: Any = build_hub_model(model)
    origin = HubWeights(str(folder), model) if folder is not None and _has_weights(folder) else None
    out.mkdir(parents=True, exist_ok=True)
    written: dict[str, torch.dtype] = {}
    tensors = _as_files(origin, source, buffers) if origin is not None else _as_saved(module, source, buffers)
    dtypes = origin.file_dtypes() if origin is not None else {}
    if origin is None and folder is not None and (folder / DTYPES).is_file():
        dtypes = dict(read_dtypes(folder, model))

    def converted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            kind = dtype or dtypes.get(name) or (torch.float32 if tensor.is_floating_point() else tensor.dtype)
            written[name] = kind
            yield name, tensor.to(kind).contiguous()

    size = write_shards(out, "model.safetensors", converted(), shard_bytes, save_tensors)
    args = {k: v for k, v in model.args.items() if k not in ("torch_dtype", "auto_map")}
    config = args | {"architectures": [type(module).__name__]}
    if (name := DTYPE_NAMES.get(max(written.values(), key=list(written.values()).count))) is not None:
        config["dtype"] = name
    for file in SIDE_FILES:
        if folder is not None and file != CONFIG:
            copy_side_file(folder / file, out / file)
    if tokenizer is not None and not (out / tokenizer.name).exists():
        copy_side_file(tokenizer, out / tokenizer.name)
    write_json(out / CONFIG, json.loads(json.dumps(config)))
    (out / "README.md").write_text(card, encoding="utf-8")
    return size


def _has_weights(folder: Path) -> bool:
    try:
        weight_files(folder)
    except JobError:
        return False
    return True


def _as_files(
    origin: HubWeights, source: Callable[[list[str]], Mapping[str, Tensor]], buffers: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the files that a model was made from, with its values now."""
    origin.module._weight_conversions = origin.conversions
    for first in origin.groups:
        names = [n for n in origin._made(first) if n in origin.state]
        values = {n: _value(origin.aliases.get(n, n), source, buffers) for n in names}
        if first not in origin.converters:
            for name, _ in origin.groups[first]:
                yield name, values[first]
            continue
        back = _reverted(origin.module, values)
        expected = [name for name, _ in origin.groups[first]]
        if set(back) != set(expected):
            raise JobError(f"transformers does not write {expected[0]} as it reads it; --to safetensors would work")
        yield from ((name, back[name]) for name in expected)


def _as_saved(
    module: Any, source: Callable[[list[str]], Mapping[str, Tensor]], buffers: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors as transformers saves a model that was not read from files; a tied weight is written once."""
    persistent = [n for n in module.state_dict(keep_vars=True) if n not in module.aliases]
    groups: dict[str, list[str]] = {}
    for name in persistent:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    for names in groups.values():
        yield from _reverted(module, {n: _value(n, source, buffers) for n in names}).items()


def _value(name: str, source: Callable[[list[str]], Mapping[str, Tensor]], buffers: Mapping[str, Tensor]) -> Tensor:
    return buffers[name] if name in buffers else source([name])[name]


def _reverted(module: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names and in the forms of files."""
    from transformers.core_model_loading import revert_weight_conversion

    with quiet():
        made: dict[str, Tensor] = revert_weight_conversion(module, values)
    return made
