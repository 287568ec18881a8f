"""The folder of a Hugging Face checkpoint: where it is, its JSON files and its weights. Does not need torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from weft.data.formats.hub_cache import HUB_NAME, cached_snapshot, hub_cache
from weft.job.errors import JobError
from weft.job.files.checked_files import MAX_JSON_BYTES, checked_file, read_json
from weft.job.load import recipes

CONFIG, GENERATION_CONFIG, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
SIDE_FILES = (
    CONFIG, GENERATION_CONFIG, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "added_tokens.json", "preprocessor_config.json", "chat_template.jinja", "chat_template.json",
    "vocab.json", "merges.txt",
)  # fmt: skip
"""Files beside the weights that an export takes over."""
SIDE_FOLDER = "pretrained"
"""Folder of a run that keeps the config and the tokenizer of an imported checkpoint."""
FORMATS = (("model.safetensors", "safetensors"), ("pytorch_model.bin", "torch"))
"""Files of weights, the preferred one first; NAME.index.json lists the shards of a large one."""


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold the weights of a checkpoint."""

    folder: Path
    format: str
    """safetensors or torch."""
    files: tuple[str, ...]
    listed: dict[str, str] | None
    """By the name of a tensor, its file, where an index lists them."""


def find_folder(name: str) -> Path:
    """The folder of a checkpoint: a path, a name beside the recipes, or one in the local hub cache. A JobError names a
    file in it that is a link out of it, or no regular file."""
    folder = _locate(name)
    check_files(folder)
    return folder


def check_files(folder: Path) -> None:
    """Refuse a folder whose config, tokenizer, templates, indexes or weights are links out of it, or no regular
    files."""
    for name in SIDE_FILES:
        checked_file(folder / name, most=MAX_JSON_BYTES)
    for name, _ in FORMATS:
        checked_file(folder / name)
        checked_file(folder / f"{name}.index.json", most=MAX_JSON_BYTES)


def _locate(name: str) -> Path:
    if "\0" in name or len(name) > 4096:
        raise JobError(f"model.pretrained: {name[:80]!r} is not a path")
    path = Path(name).expanduser()
    if not path.is_dir() and name == path.name:
        beside = {recipe.parent / name for recipe in recipes().values()}
        path = next((found for found in beside if (found / CONFIG).is_file()), path)
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise JobError(f"{path} is not a Hugging Face checkpoint: it has no {CONFIG}")
        return path
    is_hub_name = bool(HUB_NAME.fullmatch(name))
    cached = cached_snapshot("models", name, lambda found: (found / CONFIG).is_file()) if is_hub_name else None
    if cached is not None:
        return cached
    where = f", and {name} is not in the hub cache {hub_cache()}" if is_hub_name else ""
    raise JobError(f"no folder is at {name}{where}; download it first, for example with `hf download {name}`")


def existing_folder(name: str | None) -> Path | None:
    """The folder of the checkpoint that a model was made from, if it is still there; its files are checked."""
    try:
        folder = _locate(name) if name else None
    except JobError:
        return None
    if folder is not None:
        check_files(folder)
    return folder


def end_tokens(name: str) -> frozenset[int]:
    """The end tokens of a published model, from its configs."""
    folder = existing_folder(name)
    for file in (GENERATION_CONFIG, CONFIG) if folder else ():
        path = (folder or Path()) / file
        if path.is_file():
            ids = read_json(path).get("eos_token_id")
            tokens = [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]
            if tokens:
                return frozenset(tokens)
    return frozenset()


def trained_positions(name: str) -> int | None:
    """max_position_embeddings of a published model."""
    folder = existing_folder(name)
    positions = read_json(folder / CONFIG).get("max_position_embeddings") if folder else None
    return positions if isinstance(positions, int) else None


def weight_files(folder: Path) -> WeightFiles:
    """The files of weights in a folder."""
    for name, kind in FORMATS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _sharded(folder, index, kind)
        if (folder / name).is_file():
            return WeightFiles(folder, kind, (name,), None)
    names = ", ".join(name for name, _ in FORMATS)
    raise JobError(f"{folder} has no weights; they would be in {names} or an index of their shards")


def _sharded(folder: Path, index: Path, kind: str) -> WeightFiles:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise JobError(f"{index} has no weight_map from tensors to files")
    files = tuple(sorted(set(listed.values())))
    for file in files:
        if file != os.path.basename(file) or "\\" in file or "\0" in file or file in ("", ".", ".."):
            raise JobError(f"{index} names {file[:80]!r}, which is not a file inside its folder")
        if checked_file(folder / file) is None:
            raise JobError(f"{index} names {file}, which is missing in {folder}")
    if not files:
        raise JobError(f"{index} names no file")
    return WeightFiles(folder, kind, files, listed)
