"""The weights of a folder of another training library, under the names of Weft's parameters."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.extensions.pretrained.checkpoint_folder import CONFIG
from weft.extensions.pretrained.config import read_fields
from weft.extensions.pretrained.interchange.name_schemes import schemes_of
from weft.extensions.pretrained.interchange.tensor_files import TensorFiles
from weft.extensions.pretrained.reader import copy_part
from weft.extensions.pretrained.tensor_forms import FORMS, FileTensor, Shape, TensorPart, file_tensors, named_shapes
from weft.job.errors import JobError
from weft.job.files.checked_files import read_json
from weft.job.schema import Model
from weft.models.build_model import build_model

DESCRIPTION = "weft.json"
"""File that `weft export` writes beside the weights: the fields of the model."""
VOCAB_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors that Megatron pads to a multiple of rows."""


class ForeignWeights:
    """Weights that are read one parameter at a time; the names in the folder decide the scheme."""

    def __init__(self, folder: Path, files: TensorFiles, model: Model):
        self.folder, self.files, self.model = folder, files, model
        module = build_model(model)
        self.buffers = {n for n, _ in module.named_buffers()}
        own = {n: tuple(p.shape) for n, p in module.named_parameters()}
        self.prefix, self.tensors, self.shapes = self._find(own, module)
        self.by_param: dict[str, list[FileTensor]] = {}
        for tensor in self.tensors:
            for part in tensor.parts:
                self.by_param.setdefault(part.name, []).append(tensor)
        for tensor in self.tensors:
            have, need = files.shapes[self.prefix + tensor.name], tensor.shape(model)
            padded = tensor.name in VOCAB_NAMES and have[0] > need[0] and have[1:] == need[1:]
            if have != need and not padded:
                raise JobError(f"{folder} holds {tensor.name} as {list(have)}, and the model needs {list(need)}")

    def _find(self, own: dict[str, Shape], module: torch.nn.Module) -> tuple[str, list[FileTensor], dict[str, Shape]]:
        plain = [FileTensor(n, FORMS["same"], (TensorPart(n, shape),)) for n, shape in own.items()]
        tried: list[tuple[list[FileTensor], dict[str, Shape]]] = [(plain, own)]
        for scheme in schemes_of(self.model):
            try:
                shapes = named_shapes(scheme, module)
                tried.append((file_tensors(scheme, self.model, shapes.items()), shapes))
            except JobError:
                continue
        for tensors, shapes in tried:
            first = tensors[0].name
            ends = sorted((n for n in self.files.shapes if n == first or n.endswith(f".{first}")), key=len)
            for prefix in (n.removesuffix(first) for n in ends):
                if all(prefix + t.name in self.files.shapes for t in tensors):
                    return prefix, tensors, shapes
        some = ", ".join(list(self.files.shapes)[:2])
        raise JobError(f"{self.folder} holds the tensors of another model ({some}, …) than its job or config describes")

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each parameter: the widest of the tensors that hold it."""
        return {
            name: reduce(torch.promote_types, (self.files.dtype(self.prefix + tensor.name) for tensor in tensors))
            for name, tensors in self.by_param.items()
        }

    def file_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each parameter, since an export names its tensors otherwise."""
        return self.dtypes()

    @torch.no_grad()
    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """One whole parameter."""
        out = torch.empty(self.shapes[name], dtype=dtype)
        for tensor in self.by_param[name]:
            content = self.files.load(self.prefix + tensor.name)
            content = content[: tensor.shape(self.model)[0]] if tensor.name in VOCAB_NAMES else content
            values = tensor.form.split(content, [part.shape for part in tensor.parts], self.model)
            for part, value in zip(tensor.parts, values, strict=True):
                if part.name == name:
                    copy_part(part, value, out)
        return out


def described_model(folder: Path) -> dict[str, Any] | None:
    """The fields of the model that a folder describes: in weft.json, or in a config.json of transformers,
    in it or in the folder above."""
    folder = folder if (folder / DESCRIPTION).is_file() or (folder / CONFIG).is_file() else folder.parent
    if (folder / DESCRIPTION).is_file():
        found = read_json(folder / DESCRIPTION).get("model")
        if not isinstance(found, dict) or found.get("module"):
            raise JobError(f"{folder / DESCRIPTION} describes no model of Weft's own")
        return {key: value for key, value in found.items() if key != "pretrained"}
    if (folder / CONFIG).is_file():
        return read_fields(read_json(folder / CONFIG), str(folder / CONFIG))[1]
    return None
