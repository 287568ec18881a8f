"""The data types in which the tensors of a published checkpoint came, so that an export writes each in its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path

import torch

from weft.extensions.pretrained.checkpoint_folder import weight_files
from weft.extensions.pretrained.reader import PretrainedWeights
from weft.extensions.pretrained.tensor_forms import FileTensor
from weft.extensions.pretrained.weight_file import FLOATS
from weft.job.errors import JobError
from weft.job.files.checked_files import read_json
from weft.job.schema import Model
from weft.training.weight_shards import write_json

FILE = "tensor_dtypes.json"
"""File beside the config of an imported checkpoint: by the name of a tensor or of a parameter, its data type."""
Dtypes = Mapping[str, torch.dtype]
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}


def write_dtypes(folder: Path, dtypes: Dtypes) -> None:
    """Write the data types of an imported checkpoint into the folder of its config."""
    write_json(folder / FILE, {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()})


def read_dtypes(folder: Path, model: Model) -> Dtypes:
    """The data types of the checkpoint that a model was made from: as its import wrote them, or as its files, if the
    folder holds them, have them; else none."""
    if (folder / FILE).is_file():
        names = read_json(folder / FILE)
        if unknown := [f"{n}={v!r}" for n, v in names.items() if not isinstance(v, str) or v not in _BY_NAME]:
            raise JobError(f"{folder / FILE} has {unknown[0]:.80}; Weft writes {', '.join(_BY_NAME)}")
        return {name: _BY_NAME[value] for name, value in names.items()}
    try:
        weight_files(folder)
    except JobError:
        return {}
    return PretrainedWeights(str(folder), model).file_dtypes()


def dtype_of(tensor: FileTensor, dtypes: Dtypes) -> torch.dtype | None:
    """The data type in which a tensor came, or the widest of its parameters; None if it is not known."""
    names = [tensor.name] if tensor.name in dtypes else [part.name for part in tensor.parts]
    known = [dtypes[name] for name in names if name in dtypes]
    return reduce(torch.promote_types, known) if known else None
