"""Writes weights as a Hugging Face checkpoint: shards of safetensors, their index, config, tokenizer and model card."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.data.chat.template import TEMPLATE_FILE, TOKENIZER_CONFIG, ChatTemplate
from weft.extensions.pretrained.checkpoint_folder import CONFIG, GENERATION_CONFIG, SIDE_FILES, TOKENIZER
from weft.extensions.pretrained.config import write_config
from weft.extensions.pretrained.family_entry import family_of
from weft.extensions.pretrained.tensor_forms import FileTensor, file_tensors, named_shapes
from weft.job.files.checked_files import MAX_JSON_BYTES, checked_file
from weft.job.schema import Model
from weft.training.weight_shards import save_tensors, write_json, write_shards

Source = Callable[[list[str]], Mapping[str, Tensor]]
"""Reads whole parameters by name."""
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
               torch.float64: "float64"}  # fmt: skip


def write_checkpoint_folder(
    out: Path, model: Model, module: nn.Module, source: Source, *,
    dtype: torch.dtype | None = None, came_in: Callable[[FileTensor], torch.dtype | None] = lambda tensor: None,
    shard_bytes: int, original: Mapping[str, Any] | None = None,
    side_files: Path | None = None, tokenizer: Path | None = None, eos: int | None = None,
    template: ChatTemplate | None = None, card: str = "",
) -> int:  # fmt: skip
    """Write a model in the names and layout of its family; returns the bytes of the weights.

    Every tensor is written in `dtype`; without it each in the data type that it came in, which `came_in` knows, else in
    that of the config, else in fp32.
    `original` is the config it was made from, `side_files` the folder of its tokenizer and generation config; without
    them, `tokenizer` is its tokenizer.json and `eos` the token that ends a document. `template` wrote the conversations
    that it was trained on, where that is not the template among `side_files`.
    """
    config = write_config(model, original=original)
    usual = dtype or _dtype_of(original) or torch.float32
    family = family_of(config["model_type"], labels=bool(model.classes))
    tensors = file_tensors(family, model, named_shapes(family, module).items())
    dtypes = {tensor.name: dtype or came_in(tensor) or usual for tensor in tensors}
    out.mkdir(parents=True, exist_ok=True)
    converted = convert_tensors(tensors, source, model, lambda tensor: dtypes[tensor.name])
    size = write_shards(out, "model.safetensors", converted, shard_bytes, save_tensors)
    if dtype is None and _dtype_of(original) is None:
        usual = Counter(dtypes.values()).most_common(1)[0][0]
    config = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization_config")} | {
        "dtype": DTYPE_NAMES[usual]
    }
    config["eos_token_id"] = eos if config.get("eos_token_id") is None else config["eos_token_id"]
    for name in SIDE_FILES:
        if side_files is not None and name != CONFIG:
            copy_side_file(side_files / name, out / name)
    if tokenizer is not None and not (out / TOKENIZER).exists():
        copy_side_file(tokenizer, out / TOKENIZER)
    if template is not None:
        (out / TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
        if not (out / TOKENIZER_CONFIG).exists():
            write_json(
                out / TOKENIZER_CONFIG,
                {"tokenizer_class": "PreTrainedTokenizerFast"}
                | {key: text for key, text in template.tokens.items() if text},
            )
    if model.takes_tokens and not (out / GENERATION_CONFIG).exists():
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        write_json(out / GENERATION_CONFIG, ids | {"_from_model_config": True})
    write_json(out / CONFIG, config)
    (out / "README.md").write_text(card, encoding="utf-8")
    return size


def copy_side_file(path: Path, to: Path) -> None:
    """Copy a file beside the weights, if it is there; a link out of its folder is refused."""
    if checked_file(path, most=MAX_JSON_BYTES) and not (to.exists() and path.samefile(to)):
        shutil.copyfile(path, to)


def _dtype_of(config: Mapping[str, Any] | None) -> torch.dtype | None:
    name = config and (config.get("dtype") or config.get("torch_dtype"))
    return next((dtype for dtype, known in DTYPE_NAMES.items() if known == name), None)


def convert_tensors(
    tensors: list[FileTensor], source: Source, model: Model, dtype_of: Callable[[FileTensor], torch.dtype | None]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the files, one at a time; a parameter that several of them hold parts of is read once.
    `dtype_of` gives the data type of a tensor; None leaves it as it is."""
    held: dict[str, Tensor] = {}
    for tensor in tensors:
        names = [part.name for part in tensor.parts]
        if missing := [name for name in names if name not in held]:
            held = {name: value for name, value in held.items() if name in names}
            held |= source(missing)
        parts = [held[p.name] if p.index is None else held[p.name][p.index] for p in tensor.parts]
        joined = tensor.form.join(parts, model)
        yield tensor.name, joined.to(dtype_of(tensor) or joined.dtype).contiguous()
