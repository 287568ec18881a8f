"""Reads a checkpoint: its index, and the chunks that a rank needs of each tensor, whatever layout wrote them."""

from __future__ import annotations

import difflib
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from weft.checkpoint.dcp_internals import INDEX_FILE, StorageInfo, UnpicklingError, read_index
from weft.checkpoint.format import Damaged, check_file, read_manifest
from weft.comm.agreement import error_text
from weft.comm.shards import local_of, shard_of
from weft.job.files.store_path import AnyPath


class Read(NamedTuple):
    """A part of a stored chunk, and the view of a tensor that it fills."""

    info: StorageInfo
    size: torch.Size
    box: tuple[slice, ...]
    target: Tensor


class Index:
    """The tensors in a checkpoint: their names, shapes and where their bytes are."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self.files = read_manifest(path).files
        try:
            if INDEX_FILE not in self.files:
                raise ValueError("the manifest does not name it")
            with (path / INDEX_FILE).open("rb") as stream:
                found = read_index(stream)
            self.tensors = {str(name): _tensor_entry(entry) for name, entry in found.state_dict_metadata.items()}
            self.storage: dict[MetadataIndex, StorageInfo] = found.storage_data
            for info in self.storage.values():
                if info.relative_path not in self.files:
                    raise ValueError(f"it reads {info.relative_path!r}, which the manifest does not name")
            held = sum(expected.bytes for expected in self.files.values())
            if any(math.prod(entry.size) * entry.properties.dtype.itemsize > held for entry in self.tensors.values()):
                raise ValueError("it names a tensor that is larger than all its files")
            if partial := [name for name, entry in self.tensors.items() if not _is_complete(entry)]:
                raise ValueError(f"it has only a part of {partial[0]!r}")
        except Exception as error:
            raise Damaged(path, f"{INDEX_FILE} cannot be read: {error}") from error

    def files_of(self, names: set[str]) -> set[str]:
        """The files that hold these tensors."""
        return {info.relative_path for index, info in self.storage.items() if index.fqn in names}

    def mismatch(self, tensors: dict[str, Tensor]) -> str | None:
        """Why these tensors cannot be filled from here; None when they can."""
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

    @torch.no_grad()
    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Read this rank's shards of the tensors in place."""
        by_file: dict[str, list[Read]] = {}
        for name, tensor in tensors.items():
            for read in self._reads(name, tensor):
                by_file.setdefault(read.info.relative_path, []).append(read)
        for file, reads in by_file.items():
            with (self.path / file).open("rb") as stream:
                for info, size, box, target in sorted(reads, key=lambda read: read.info.offset):
                    if getattr(info, "transform_descriptors", None):
                        raise ValueError(f"{file} is stored with {info.transform_descriptors}")
                    stream.seek(info.offset)
                    content = io.BytesIO(stream.read(info.length))
                    try:
                        chunk = torch.load(content, map_location="cpu", weights_only=True)
                    except UnpicklingError:  # whose text advises to load the file as code
                        raise ValueError(f"{file} holds something else than tensors, which is not read") from None
                    if not isinstance(chunk, Tensor) or chunk.shape != size:
                        raise ValueError(f"{file} holds something else than the index names")
                    target.copy_(chunk[box])

    def _reads(self, name: str, tensor: Tensor) -> list[Read]:
        """The parts of stored chunks that overlap this rank's shard of a tensor."""
        shard, local = shard_of(tensor), local_of(tensor.detach())
        reads = []
        for chunk in self.tensors[name].chunks:
            begin = [max(a, b) for a, b in zip(shard.offset, chunk.offsets, strict=True)]
            ends = zip(shard.offset, shard.size, chunk.offsets, chunk.sizes, strict=True)
            end = [min(a + n, b + m) for a, n, b, m in ends]
            if all(b < e for b, e in zip(begin, end, strict=True)):
                inside = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, chunk.offsets, strict=True))
                there = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, shard.offset, strict=True))
                info = self.storage[MetadataIndex(name, chunk.offsets)]
                reads.append(Read(info, chunk.sizes, inside, local[there]))
        return reads


def load_full(path: AnyPath, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor whose name starts with prefix, unsharded, in host memory; one process, no process group."""
    index = Index(path)
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.tensors.items()
        if name.startswith(prefix)
    }
    for name in sorted({INDEX_FILE, *index.files_of(set(tensors))}):
        if why := check_file(path, name, index.files[name]):
            raise Damaged(path, why)
    try:
        index.fill(tensors)
    except Exception as error:
        raise Damaged(path, f"its files are intact, but it cannot be loaded: {error_text(error)}") from error
    return tensors


def load_named(index: Index, names: Sequence[str], prefix: str) -> dict[str, Tensor]:
    """Some tensors by name without their prefix, unsharded, in host memory, of a checkpoint that was verified."""
    try:
        tensors = {n: torch.empty(e.size, dtype=e.properties.dtype) for n in names for e in [index.tensors[prefix + n]]}
        index.fill({prefix + n: t for n, t in tensors.items()})
    except Exception as error:
        raise Damaged(index.path, f"its files are intact, but it cannot be loaded: {error_text(error)}") from error
    return tensors


def kind_of(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(size)}"


def _is_complete(entry: TensorStorageMetadata) -> bool:
    return sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)


def _tensor_entry(entry: Any) -> TensorStorageMetadata:
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError("it holds something that is no tensor")
    return entry
