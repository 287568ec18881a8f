"""Writes a checkpoint: each rank its file under a temporary name, then the index, the manifest and the rename.

The ranks exchange their plans and results as JSON. The files are those that torch's DCP writes.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from weft.checkpoint.contents import Chunk
from weft.checkpoint.dcp_internals import INDEX_FILE, StorageInfo, write_index
from weft.checkpoint.format import (
    FileSum,
    Manifest,
    begin_folder,
    check_file,
    checkpoint_name,
    commit_file,
    put_in_place,
    sync_folder,
    write_manifest,
)
from weft.comm.agreement import Agreement, T, error_text
from weft.job.errors import file_named
from weft.job.files.store_path import AnyPath, StorePath, remove_tree

MAX_FAILURES_NAMED = 3


class SaveFailed(Exception):
    """A save that failed on at least one rank; all ranks raise it."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclasses.dataclass(frozen=True)
class Saved:
    """A finished save: its size on disk, and where the checkpoint that had its name was moved."""

    bytes: int
    replaced: AnyPath | None


class Contents(Protocol):
    """What a checkpoint is written from: the chunks of this rank, and their tensors by the same index."""

    def plan(self) -> list[tuple[Any, ...]]: ...

    @property
    def tensors(self) -> Sequence[Tensor]: ...


Extents = list[list[int]]
"""Offset and length in its file of every chunk that a rank wrote."""


def write_checkpoint(
    contents: Contents,
    folder: AnyPath,
    manifest: Manifest,
    ranks: Agreement,
    *,
    replaces_damaged: bool = False,
    fence: Callable[[], None] = lambda: None,
) -> Saved:
    """Write the chunks of all ranks as one checkpoint. Collective; raises SaveFailed on every rank or on none.

    `fence` is called on rank 0 before the checkpoint takes its name.
    """
    plans = [[Chunk.of_json(row) for row in plan] for plan in on_every_rank(ranks, contents.plan)]
    check_plans(plans)
    writes = assign_chunks(plans)
    mine = writes[ranks.rank]

    def make_folder() -> tuple[str, str | None, str]:
        # Rank 0 alone picks the names, so that no file of an earlier try, nor of a rank of a dead run that still
        # writes, can get in. Only the names: nodes may see the disk under different paths.
        made, replaced = begin_folder(folder, manifest.step, damaged=replaces_damaged)
        mark = f"-{secrets.token_hex(4)}" if isinstance(folder, StorePath) else ""
        return made.name, replaced.name if replaced else None, mark

    name, moved, mark = ranks.first(make_folder, SaveFailed)
    made = folder / name

    def write_own_file() -> tuple[Extents, int, int]:
        made.mkdir(parents=True, exist_ok=True)  # on a node that does not see rank 0's disk: finish() reports that
        extents, written = write_file(made / _file_name(ranks.rank, mark), (contents.tensors[i] for i in mine))
        return extents, written.bytes, written.crc32

    def finish() -> tuple[int, str | None]:
        files = {_file_name(rank, mark): FileSum(*result[1:]) for rank, result in enumerate(results)}
        for name, expected in files.items():
            if why := check_file(made, name, expected, checksum=False):
                raise OSError(f"{why} where rank 0 looks; {folder} must be one folder that every node sees")
        files[INDEX_FILE] = write_index_file(made, plans, writes, [result[0] for result in results], mark)
        fence()
        write_manifest(made, dataclasses.replace(manifest, files=files))
        fence()
        replaced = put_in_place(made, folder / checkpoint_name(manifest.step), damaged=replaces_damaged)
        sync_folder(folder.parent)
        return sum(file.bytes for file in files.values()), replaced.name if replaced else moved

    try:
        results = on_every_rank(ranks, write_own_file)
        size, replaced = ranks.first(finish, SaveFailed)
    except SaveFailed:  # every rank has stopped writing
        with suppress(OSError):
            remove_tree(made) if isinstance(made, StorePath) else shutil.rmtree(made, ignore_errors=True)
        raise
    return Saved(size, folder / replaced if replaced else None)


def on_every_rank(ranks: Agreement, work: Callable[[], T]) -> list[T]:
    """Do some work on every rank and return all results, by rank; SaveFailed on every rank if it fails on one."""
    result, why = None, None
    try:
        result = work()
    except Exception as error:
        why = error_text(error)
    answers = ranks.gather((result, why))
    failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(answers) if why]
    if failed:
        more = f"; and {len(failed) - MAX_FAILURES_NAMED} more ranks" if len(failed) > MAX_FAILURES_NAMED else ""
        raise SaveFailed("; ".join(failed[:MAX_FAILURES_NAMED]) + more)
    return [result for result, _ in answers]  # type: ignore[misc]


def check_plans(plans: list[list[Chunk]]) -> None:
    """Refuse plans in which a name means two tensors, or of which a tensor lacks a part."""
    tensors: dict[str, Chunk] = {}
    held: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, plan in enumerate(plans):
        for chunk in plan:
            other = tensors.setdefault(chunk.name, chunk)
            if other.kind != chunk.kind:
                raise SaveFailed(
                    f"rank {rank} gives {chunk.name!r} as {chunk.kind}, another rank as {other.kind}; two tensors "
                    "need two names"
                )
            held[chunk.name, chunk.offset] = chunk.numel
    missing = {name: torch.Size(chunk.shape).numel() for name, chunk in tensors.items()}
    for (name, _), count in held.items():
        missing[name] -= count
    for name, count in missing.items():
        if count:
            raise SaveFailed(f"the ranks together hold only a part of {name!r}")


def assign_chunks(plans: list[list[Chunk]]) -> list[list[int]]:
    """Which of its chunks each rank writes: one that several hold goes to the rank with the fewest bytes so far."""
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, plan in enumerate(plans):
        for i, chunk in enumerate(plan):
            holders.setdefault((chunk.name, chunk.offset), []).append((rank, i))
    writes: list[list[int]] = [[] for _ in plans]
    planned = [0] * len(plans)
    for held in holders.values():
        rank, i = min(held, key=lambda at: planned[at[0]])
        chunk = plans[rank][i]
        planned[rank] += max(1, chunk.numel * getattr(torch, chunk.dtype).itemsize)
        writes[rank].append(i)
    return writes


def write_file(path: AnyPath, tensors: Iterable[Tensor]) -> tuple[Extents, FileSum]:
    """Write tensors one after the other, each as torch.save does; durable on return."""
    extents: Extents = []
    with _open(path) as raw:
        stream = _SummingStream(path, raw)
        for tensor in tensors:
            start = stream.position
            if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize:
                tensor = tensor.clone()  # torch.save writes all of a view's storage
            torch.save(tensor, stream)  # type: ignore[arg-type]
            extents.append([start, stream.position - start])
        return extents, stream.finish()


def write_torch_file(path: AnyPath, value: object) -> None:
    """torch.save that raises the error of the system, with the file's name, if the file cannot be written."""
    with _open(path) as raw:
        stream = _SummingStream(path, raw)
        torch.save(value, stream)  # type: ignore[arg-type]
        stream.finish()


def _open(path: AnyPath) -> IO[bytes]:
    return path.open("wb") if isinstance(path, StorePath) else path.open("wb", buffering=1 << 20)


def _file_name(rank: int, mark: str) -> str:
    return f"__{rank}_0{mark}.distcp"


def write_index_file(
    made: AnyPath, plans: list[list[Chunk]], writes: list[list[int]], extents: list[Extents], mark: str = ""
) -> FileSum:
    """Write the index of everything that the ranks wrote."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    for rank, chosen in enumerate(writes):
        for i, (offset, length) in zip(chosen, extents[rank], strict=True):
            chunk = plans[rank][i]
            properties = TensorProperties(dtype=getattr(torch, chunk.dtype))
            entry = tensors.setdefault(chunk.name, TensorStorageMetadata(properties, torch.Size(chunk.shape), []))
            index = MetadataIndex(chunk.name, chunk.offset, len(entry.chunks))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)))
            storage[index] = StorageInfo(_file_name(rank, mark), offset, length)
    with (made / INDEX_FILE).open("wb") as raw:
        stream = _SummingStream(made / INDEX_FILE, raw)
        write_index(stream, tensors, storage)
        return stream.finish()


class _SummingStream:
    """A file whose length and checksum are known from the bytes written, without reading them back.

    The first error is kept until finish(): torch's zip writer would replace it by one of its own.
    """

    def __init__(self, path: AnyPath, raw: IO[bytes]) -> None:
        self._path, self._raw = path, raw
        self.position, self.crc32 = 0, 0
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)
        self.position += size
        self._try(lambda: self._raw.write(data))
        return size

    def flush(self) -> None:
        self._try(self._raw.flush)

    def finish(self) -> FileSum:
        """Make the file durable, and raise what went wrong with it."""
        self._try(lambda: commit_file(self._path, self._raw))
        if self.error is not None:
            with suppress(Exception):  # what a full disk or a store refused would be raised again
                self._raw.close()
            raise self.error
        return FileSum(self.position, self.crc32)

    def _try(self, action: Callable[[], object]) -> None:
        if self.error is None:
            try:
                with file_named(self._path):
                    action()
            except Exception as error:  # a store's package has errors of its own
                self.error = error
