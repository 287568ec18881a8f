"""Names of torch's distributed checkpoint (DCP) that its index file, `.metadata`, is made of.

Weft writes and reads that index itself, without DCP's collectives, which exchange pickled objects. DCP's own tools can
still open a checkpoint.
"""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

INDEX_FILE = ".metadata"
UnpicklingError = pickle.UnpicklingError
ALLOWED_NAMES = {
    "torch.distributed.checkpoint.metadata": [
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "pathlib": ["PosixPath", "PurePosixPath"],
    "torch": ["Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))],
}
"""Everything that the pickle of an index may import."""

StorageInfo = _StorageInfo
"""relative_path, offset and length of one chunk."""


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles an index and refuses to import anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an index")
        return super().find_class(module, name)


def read_index(stream: IO[bytes]) -> Metadata:
    """Read an index without running code that it names."""
    found = _IndexUnpickler(stream).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__} instead of an index")
    return found


def write_index(stream: Any, tensors: dict[str, Any], storage: dict[Any, StorageInfo]) -> None:
    """Write the index of these tensors and of where their chunks are stored."""
    index = Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    pickle.dump(index, stream)
