"""The parts of torch's DCP that checkpoints depend on are where they were."""

from __future__ import annotations

import importlib
import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from weft.checkpoint.dcp_internals import ALLOWED_NAMES, StorageInfo, read_index, write_index


def test_every_name_in_an_index_is_still_in_torch() -> None:
    for module, allowed in ALLOWED_NAMES.items():
        for name in allowed:
            assert hasattr(importlib.import_module(module), name), (
                f"torch has moved {module}.{name}: checkpoints written before name it, and cannot be read"
            )


def test_an_index_is_read_as_it_was_written() -> None:
    stream, size = io.BytesIO(), torch.Size([2, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    tensors = {"w": TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, [chunk])}
    write_index(stream, tensors, {MetadataIndex("w", [0, 0]): StorageInfo("__0_0.distcp", 5, 7)})
    stream.seek(0)
    found = read_index(stream)
    assert found.state_dict_metadata == tensors, "torch's DCP metadata no longer survives a round trip"
    [info] = found.storage_data.values()
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 5, 7)


@pytest.mark.parametrize("content", [print, [1, 2], {"a": torch.float32}], ids=["code", "list", "dict"])
def test_anything_else_is_refused(content: object) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        read_index(io.BytesIO(pickle.dumps(content)))
