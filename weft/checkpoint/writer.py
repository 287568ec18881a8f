"""How a checkpoint is written: DCP's files under a temporary name, checksums, the manifest last, then the rename."""

from __future__ import annotations

import dataclasses
import io
import shutil
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft.checkpoint.contents import Snapshot
from weft.checkpoint.format import (
    FileSum,
    Manifest,
    aside_name,
    check_file,
    checkpoint_name,
    put_in_place,
    sync_folder,
    write_manifest,
)


class Writer(FileSystemWriter):
    """Writes one checkpoint: under a temporary name, with checksums, the manifest last, then the rename."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, replaces_damaged: bool, fence: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self.folder, self.manifest, self.replaces_damaged, self.fence = folder, manifest, replaces_damaged, fence
        self.final = folder / checkpoint_name(manifest.step)
        self.aside: Path | None = None
        self.total_bytes = 0
        self.fs: _SummingFileSystem = _SummingFileSystem()
        self._made: Path | None = None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # The coordinator alone picks the name, so that no file of an earlier try, nor of a rank of a dead run that
        # still writes, can get in.
        self.folder.mkdir(parents=True, exist_ok=True)
        name = aside_name(self.manifest.step, "tmp")
        (self.folder / name).mkdir()
        return [dataclasses.replace(p, storage_data=_Place(f"__{i}_", name)) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.path = self._made = self.folder / plan.storage_data.name
        # On a node that does not see the coordinator's disk; finish() then says so in words.
        self._made.mkdir(parents=True, exist_ok=True)
        results = super().write_data(plan, planner).value()
        done: Future[list[WriteResult]] = Future()
        done.set_result(_Written(results, self.fs.sums))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        made = cast(Path, self._made)
        super().finish(metadata, results)
        files = {name: expected for written in results for name, expected in cast(_Written, written).files.items()}
        for name, expected in files.items():
            if why := check_file(made, name, expected, checksum=False):
                raise OSError(f"{why} where rank 0 looks; {self.folder} must be one folder that every node sees")
        files |= self.fs.sums
        self.total_bytes = sum(expected.bytes for expected in files.values())
        write_manifest(made, dataclasses.replace(self.manifest, files=files))
        self.fence()
        self.aside = put_in_place(made, self.final, damaged=self.replaces_damaged)
        sync_folder(self.folder.parent)

    def discard(self) -> None:
        """Free the room that a failed save took; only where every rank has stopped writing."""
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def run_save(snapshot: Snapshot, writer: Writer, group: dist.ProcessGroup | None) -> None:
    """DCP's save: plan on every rank, agree, write, finish on the coordinator. Collectives on group alone.

    The public dcp.save is the same call behind a warning on every save by a single process.
    """
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    _save_state_dict({}, writer, process_group=group, no_dist=group is None, planner=snapshot)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a rank writes: the folder's name, since nodes may see the disk under different paths.

    DCP reads prefix: the files are PREFIX0.distcp and so on.
    """

    prefix: str
    name: str


class _Written(list[WriteResult]):
    """What a rank wrote, on its way to the coordinator together with the sums of its files."""

    def __init__(self, results: list[WriteResult], files: dict[str, FileSum]) -> None:
        super().__init__(results)
        self.files = files


class _SummingFileSystem(FileSystem):
    """Files whose length and checksum are known from the bytes on their way out, never from reading them back."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        raw = open(path, mode, buffering=1 << 20)  # noqa: SIM115
        stream = _SummingStream(cast(BinaryIO, raw))
        try:
            yield cast(io.IOBase, stream)
            stream.flush()
        finally:
            # What a full disk refused is already in stream.error; close would only say it again.
            with suppress(OSError):
                raw.close()
        if stream.error is not None:
            raise stream.error
        self.sums[Path(path).name] = FileSum(stream.position, stream.crc32)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummingStream:
    """A file that keeps its first error until the end: torch's zip writer would bury it under one of its own."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.position, self.crc32 = 0, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)
        self.position += size
        self._try(lambda: self._raw.write(data))
        return size

    def flush(self) -> None:
        self._try(self._raw.flush)

    def close(self) -> None:
        """DCP closes what it wrote; the file itself is closed where it was opened."""
        self.flush()

    def tell(self) -> int:
        return self.position

    def fileno(self) -> int:
        self.flush()
        return self._raw.fileno()

    def _try(self, action: Any) -> None:
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error
