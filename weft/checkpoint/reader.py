"""How a checkpoint is read: DCP's index, taken without running anything in it, and the tensors it leads to."""

from __future__ import annotations

import difflib
import math
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from weft.checkpoint.contents import covered, kind_of
from weft.checkpoint.format import Damaged, read_manifest

# All that the pickle of a Metadata names, and nothing else is ever looked up, let alone called.
_INDEX_NAMES = {
    "torch.distributed.checkpoint.metadata": [
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "torch": ["Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))],
}


class Index:
    """The tensors in a checkpoint: their names, shapes and where their bytes are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = read_manifest(path).files
        try:
            if ".metadata" not in self.files:
                raise ValueError("the manifest does not name it")
            with (path / ".metadata").open("rb") as stream:
                self.metadata = _IndexUnpickler(stream).load()
            self.tensors: dict[str, TensorStorageMetadata] = {
                str(name): _tensor_entry(entry) for name, entry in self.metadata.state_dict_metadata.items()
            }
            self.where: dict[str, set[str]] = {}
            for index, info in self.metadata.storage_data.items():
                if info.relative_path not in self.files:
                    raise ValueError(f"it reads {info.relative_path!r}, which the manifest does not name")
                self.where.setdefault(index.fqn, set()).add(info.relative_path)
            held = sum(expected.bytes for expected in self.files.values())
            if any(_size(entry) > held for entry in self.tensors.values()):
                raise ValueError("it names a tensor that is larger than all its files")
            if partial := [name for name, entry in self.tensors.items() if not covered(entry)]:
                raise ValueError(f"it has only a part of {partial[0]!r}")
        except Exception as error:
            raise Damaged(path, f".metadata cannot be read: {error}") from error

    def mismatch(self, tensors: dict[str, Tensor]) -> str | None:
        """What a person must know when these tensors cannot be filled from here; None when they can."""
        for name, tensor in tensors.items():
            saved = self.tensors.get(name)
            if saved is None:
                near = difflib.get_close_matches(name, self.tensors, n=1)
                hint = f"the nearest name in it is {near[0]!r}" if near else "nothing in it has a name like that"
                return f"checkpoint {self.path} has no tensor {name!r}: another model or optimizer wrote it; {hint}"
            have, want = saved.properties.dtype, tensor.dtype
            # Between floating types a value keeps its meaning; anything else would be another quantity.
            alike = have == want or (have.is_floating_point and want.is_floating_point)
            if saved.size != tensor.shape or not alike:
                return (
                    f"checkpoint {self.path} has {name!r} as {kind_of(saved.size, have)}, and this job needs "
                    f"{kind_of(tensor.shape, want)}: set the model's sizes to those it was trained with"
                )
        return None

    def fill(self, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """Read the tensors in place, each rank its own part."""
        with torch.no_grad():
            _dcp_load(tensors, _Reader(self.path, self.metadata), group)


def _dcp_load(tensors: dict[str, Tensor], reader: FileSystemReader, group: dist.ProcessGroup | None) -> None:
    """DCP's load, again without the warning for a single process."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _load_state_dict(dict(tensors), reader, process_group=group, no_dist=group is None, planner=planner)


class _Reader(FileSystemReader):
    """Reads with an index that has already been read safely."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    # Not named kwargs: DCP would take that for the promise of an index for each rank, and ask for it.
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


class _IndexUnpickler(pickle.Unpickler):
    """Reads DCP's .metadata, which is a pickle, without letting it name anything that runs."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return super().find_class(module, name)


def _size(entry: TensorStorageMetadata) -> int:
    """Bytes of a whole tensor: what is claimed must also be there before memory is taken for it."""
    return math.prod(entry.size) * entry.properties.dtype.itemsize


def _tensor_entry(entry: Any) -> TensorStorageMetadata:
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError("it holds something that is no tensor")
    return entry
