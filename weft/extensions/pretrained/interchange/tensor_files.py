"""Named tensors in folders that other training libraries wrote. Code in them is never run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from weft.checkpoint.dcp_internals import INDEX_FILE, read_index
from weft.checkpoint.reader import Index
from weft.comm.agreement import error_text
from weft.extensions.pretrained.tensor_forms import Shape
from weft.job.errors import JobError
from weft.job.files.checked_files import checked_file

ZERO, FP32 = "zero", "fp32.pt"
"""A universal checkpoint of DeepSpeed has zero/NAME/fp32.pt for each parameter."""
LATEST_UNIVERSAL = "latest_universal"
ITERATION, MEGATRON_FILE = "latest_checkpointed_iteration.txt", "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
_GATES_AND_ROWS = ("linear_fc1.weight", "linear_fc1.bias")


class TensorFiles(Protocol):
    """The tensors of a folder, by the names that they have in it."""

    shapes: dict[str, Shape]

    def dtype(self, name: str) -> torch.dtype: ...

    def load(self, name: str) -> Tensor: ...


class DcpFiles(Index):
    """A folder of torch's distributed checkpoints, with or without entries that are no tensors."""

    def __init__(self, path: Path):
        self.path = path
        checked_file(path / INDEX_FILE)
        try:
            with (path / INDEX_FILE).open("rb") as stream:
                found = read_index(stream)
            entries = {str(n): e for n, e in found.state_dict_metadata.items()}
            self.tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
            self.storage = found.storage_data
            held = 0
            for file in {info.relative_path for info in self.storage.values()}:
                if file != Path(file).name or checked_file(path / file) is None:
                    raise ValueError(f"it reads {file!r}, which is not a file beside it")
                held += (path / file).stat().st_size
            for name, entry in self.tensors.items():
                if entry.size.numel() * entry.properties.dtype.itemsize > held:
                    raise ValueError(f"{name!r} is larger than all its files")
        except JobError:
            raise
        except Exception as error:
            raise JobError(f"{path / INDEX_FILE} is not an index of torch's checkpoints: {_line(error)}") from None
        self.shapes: dict[str, Shape] = {n: tuple(e.size) for n, e in self.tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].properties.dtype

    def load(self, name: str) -> Tensor:
        out = torch.empty(self.shapes[name], dtype=self.dtype(name))
        try:
            self.fill({name: out})
        except Exception as error:
            raise JobError(f"{self.path} does not hold {name} as its index says: {_line(error)}") from None
        return out


class DeepSpeedFiles:
    """A universal checkpoint of DeepSpeed."""

    def __init__(self, path: Path):
        self.path = path
        self.files = {folder.name: folder / FP32 for folder in (path / ZERO).iterdir() if (folder / FP32).is_file()}
        self.shapes: dict[str, Shape] = {name: tuple(self.load(name).shape) for name in self.files}

    def dtype(self, name: str) -> torch.dtype:
        return self.load(name).dtype

    def load(self, name: str) -> Tensor:
        found = load_data(self.files[name], self.path)
        value = found.get("param") if isinstance(found, dict) else found
        if not isinstance(value, Tensor):
            raise JobError(f"{self.files[name]} holds no parameter")
        return value


class MegatronFiles:
    """mp_rank_XX/model_optim_rng.pt of each rank of tensor parallelism, mp_rank_XX_YYY with pipeline stages."""

    def __init__(self, path: Path):
        self.path = path
        ranks = {tuple(int(n or 0) for n in m.groups()): p for p in path.iterdir() if (m := _RANK.fullmatch(p.name))}
        stages = sorted({pp for _, pp in ranks})
        self.parts: dict[str, list[Tensor]] = {}
        first = 0
        for pp in stages:
            layers = 0
            for tp in sorted(t for t, p in ranks if p == pp):
                for name, tensor in self._model(ranks[tp, pp] / MEGATRON_FILE).items():
                    if match := _LAYER.fullmatch(name):
                        layers = max(layers, int(match[2]) + 1)
                        name = f"{match[1]}{int(match[2]) + first}{match[3]}"
                    held = self.parts.setdefault(name, [])
                    if len(held) == tp:  # the last stage may repeat a tied embedding
                        held.append(tensor)
            first += layers
        self.shapes: dict[str, Shape] = {n: tuple(self.load(n).shape) for n in self.parts}

    def _model(self, path: Path) -> dict[str, Tensor]:
        found = load_data(path, self.path)
        model = found.get("model") if isinstance(found, dict) else None
        if not isinstance(model, dict):
            raise JobError(f"{path} holds no model; virtual pipeline stages are not supported")
        return {str(n): t for n, t in model.items() if isinstance(t, Tensor)}

    def dtype(self, name: str) -> torch.dtype:
        return self.parts[name][0].dtype

    def load(self, name: str) -> Tensor:
        parts = self.parts[name]
        if len(parts) == 1:
            return parts[0]
        if name.endswith(_BY_COLUMNS):
            return torch.cat(parts, 1)
        if name.endswith(_GATES_AND_ROWS):
            halves = [part.chunk(2) for part in parts]
            return torch.cat([half[i] for i in (0, 1) for half in halves])
        return torch.cat(parts) if name.endswith(_BY_ROWS) else parts[0]


def load_data(path: Path, folder: Path) -> Any:
    """The content of a file of torch.save in a folder; of Python objects, only argparse's Namespace."""
    if checked_file(path, folder) is None:
        raise JobError(f"{path} is missing")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise JobError(f"{path} is not a file of weights: {_line(error)}") from None


def _line(error: Exception) -> str:
    text = error_text(error)
    if "weights_only" in text or "Unsupported global" in text or "which is not part of an index" in text:
        return "it names Python code, which is never run"
    return text.splitlines()[0][:200] if text else type(error).__name__


def _newest(folder: Path, pattern: str, file: str) -> Path | None:
    """The sub-folder with the highest number that holds a file."""
    found = {int(m[1]): p for p in folder.glob("*") if (m := re.fullmatch(pattern, p.name)) and (p / file).exists()}
    return found[max(found)] if found else None


def _find_dcp(folder: Path) -> Path | None:
    return folder if (folder / INDEX_FILE).is_file() else _newest(folder, r"step-(\d+)", INDEX_FILE)


def _find_deepspeed(folder: Path) -> Path | None:
    if (folder / ZERO).is_dir():
        return folder
    return _newest(folder, r"global_step(\d+)_universal", ZERO)


def _find_megatron(folder: Path) -> Path | None:
    if any(_RANK.fullmatch(p.name) and (p / MEGATRON_FILE).is_file() for p in folder.iterdir()):
        return folder
    found = sorted(p for p in folder.glob("iter_*") if any(p.glob(f"mp_rank_*/{MEGATRON_FILE}")))
    return found[-1] if found else None


FORMATS: dict[str, tuple[Callable[[Path], Path | None], Callable[[Path], TensorFiles]]] = {
    "torch DCP": (_find_dcp, DcpFiles),
    "DeepSpeed": (_find_deepspeed, DeepSpeedFiles),
    "Megatron": (_find_megatron, MegatronFiles),
}
"""By format, what finds the checkpoint in a folder, and what reads it."""


def open_tensor_files(folder: Path) -> TensorFiles | None:
    """The tensors of a folder in one of these formats; None if it is in none."""
    for find, make in FORMATS.values():
        if folder.is_dir() and (found := find(folder)) is not None:
            return make(found)
    return None
