"""The format of a checkpoint on disk: folder names, the manifest, verification. Does not need torch."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from weft.job.errors import JobError, MachineError, file_named
from weft.job.files.store_path import AnyPath, StorePath, copy_tree, remove_tree, size_of

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(tmp|old|damaged|trash)-\w+)?")
_BLOCK = 4 << 20
WEIGHTS_ONLY = "weights_only"
"""Key of the metadata of a checkpoint that holds no optimizer state: a run starts from it, but does not resume."""
MAX_MANIFEST_BYTES = 256 << 20


class Damaged(MachineError):
    """A checkpoint that cannot be used, and why."""

    def __init__(self, path: AnyPath, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged: {self.why}"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint whose files all match its manifest."""

    step: int
    path: AnyPath
    meta: dict[str, Any]


@dataclass(frozen=True)
class FileSum:
    """The expected length and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint, written last: a folder without it is an unfinished save."""

    step: int
    meta: dict[str, Any]
    files: dict[str, FileSum]

    def to_json(self) -> dict[str, Any]:
        files = {name: {"bytes": s.bytes, "crc32": s.crc32} for name, s in sorted(self.files.items())}
        return {"format": FORMAT, "step": self.step, "meta": self.meta, "files": files}

    @classmethod
    def of_json(cls, body: dict[str, Any]) -> Manifest:
        files = {name: FileSum(_natural(f["bytes"]), _natural(f["crc32"])) for name, f in body["files"].items()}
        return cls(_natural(body["step"]), dict(body["meta"]), files)


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder that a Checkpointer made. kind: good (by name only), tmp, old, damaged or trash."""

    step: int
    kind: str
    path: AnyPath


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def aside_name(step: int, kind: str) -> str:
    """A unique name for a folder of this step that is not, or no longer, a checkpoint."""
    return f"{checkpoint_name(step)}.{kind}-{uuid.uuid4().hex[:8]}"


def entries(folder: AnyPath) -> list[CheckpointFolder]:
    """Every checkpoint folder in `folder`, of any kind, lowest step first."""
    if isinstance(folder, StorePath):
        return _entries_of_store(folder)
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append(CheckpointFolder(int(match[1]), match[2] or "good", path))
    return sorted(found, key=lambda entry: entry.step)


def _entries_of_store(folder: StorePath) -> list[CheckpointFolder]:
    """The same in a store, where a folder without a manifest is an upload that was interrupted, or still runs."""
    names = folder.names()
    finished = {name.split("/")[0] for name in names if name.endswith(f"/{MANIFEST}")}
    found = []
    for name in sorted({name.split("/")[0] for name in names if "/" in name}):
        if match := _NAME.fullmatch(name):
            kind = (match[2] or "good") if name in finished else "tmp"
            found.append(CheckpointFolder(int(match[1]), kind, folder / name))
    return sorted(found, key=lambda entry: entry.step)


def list_checkpoints(folder: AnyPath) -> list[AnyPath]:
    """The checkpoints in `folder` by name, oldest first, good or not.

    Includes, before its replacement, one that was moved aside for a newer save of its step and not yet deleted.
    """
    listed = [entry for entry in entries(folder) if entry.kind in ("good", "old")]
    return [entry.path for entry in sorted(listed, key=lambda entry: (entry.step, entry.kind == "good"))]


def leftovers(folder: AnyPath, good_step: int, damaged: Collection[AnyPath]) -> list[CheckpointFolder]:
    """What interrupted saves and deletions left and can be deleted, since the checkpoint of good_step is good."""
    every = entries(folder)
    intact = {
        e.step for e in every if e.kind == "good" and e.path not in damaged and not verify(e.path, checksum=False)
    }
    deletable = {
        "tmp": lambda step: step <= good_step,
        "old": lambda step: step < good_step or step in intact,
        "trash": lambda step: True,
    }
    return [e for e in every if e.kind in deletable and deletable[e.kind](e.step)]


def restore(folder: AnyPath) -> None:
    """Rename a checkpoint back that was moved aside for a save which was then not finished."""
    every = entries(folder)
    taken = {entry.step for entry in every if entry.kind == "good"}
    for entry in every:
        if entry.kind == "old" and entry.step not in taken:
            _move(entry.path, folder / checkpoint_name(entry.step))
            taken.add(entry.step)


def read_manifest(path: AnyPath) -> Manifest:
    """The manifest of the checkpoint at path; raises Damaged when it is invalid, JobError when nothing is there."""
    if not path.is_dir():
        raise JobError(f"no checkpoint is at {path}; it would be a folder such as {checkpoint_name(200)}")
    file = path / MANIFEST
    try:
        if isinstance(file, Path) and not stat.S_ISREG(file.lstat().st_mode):
            raise Damaged(path, f"{MANIFEST} is not a regular file")
        if size_of(file) > MAX_MANIFEST_BYTES:
            raise Damaged(path, f"{MANIFEST} is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
        text = file.read_bytes()
    except FileNotFoundError:
        raise Damaged(path, f"it has no {MANIFEST}, so it was never finished") from None
    except OSError as error:
        raise Damaged(path, f"{MANIFEST} cannot be read: {error}") from error
    try:
        body = json.loads(text)
        checksum = body.pop("crc32")
        version = body["format"]
        if version != FORMAT:
            raise Damaged(path, f"its format is {version!r}, and this version of Weft reads format {FORMAT}")
        manifest = Manifest.of_json(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(path, f"{MANIFEST} is not a manifest ({type(error).__name__}: {error})") from error
    for name in manifest.files:
        if name != os.path.basename(name) or "\\" in name or "\0" in name or name in ("", ".", "..", MANIFEST):
            raise Damaged(path, f"{MANIFEST} names {name!r}, which is not a file inside the checkpoint")
    if checksum != _body_sum(body):
        raise Damaged(path, f"{MANIFEST} has another checksum than when it was written")
    match = _NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise Damaged(path, f"{MANIFEST} says it is of step {manifest.step}")
    return manifest


def write_manifest(path: AnyPath, manifest: Manifest) -> None:
    """Write the manifest into the folder at path; durable on return, as are the names of the other files."""
    body = manifest.to_json()
    with file_named(path / MANIFEST), (path / MANIFEST).open("wb") as stream:
        stream.write(json.dumps({**body, "crc32": _body_sum(body)}, indent=1).encode())
        commit_file(path / MANIFEST, stream)
    sync_folder(path)


def commit_file(path: AnyPath, stream: IO[bytes]) -> None:
    """Make what was written to an open file durable; an upload is complete only after this."""
    if isinstance(path, StorePath):
        stream.close()
    else:
        stream.flush()
        os.fsync(stream.fileno())


def check_file(
    path: AnyPath, name: str, expected: FileSum, *, checksum: bool = True, cached: bool = True
) -> str | None:
    """None when the file matches the manifest, else what is wrong. cached=False reads from the disk, not the cache."""
    try:
        file = path / name
        if isinstance(file, Path) and not stat.S_ISREG(file.lstat().st_mode):
            return f"{name} is not a regular file; a link could lead out of the checkpoint"
        size = size_of(file)
        if size != expected.bytes:
            return f"{name} has {size} bytes instead of {expected.bytes}"
        if not checksum:
            return None
        crc = 0
        with file.open("rb") as stream:
            if not cached and isinstance(file, Path) and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while block := stream.read(_BLOCK):
                crc = zlib.crc32(block, crc)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return None if crc == expected.crc32 else f"{name} has another checksum than when it was written"


def verify(path: AnyPath, *, checksum: bool = True) -> str | None:
    """None when every file of the checkpoint is as it was written, else what is wrong.

    Without checksum only the manifest and the sizes are checked.
    """
    try:
        manifest = read_manifest(path)
    except JobError as error:
        return str(error)
    except Damaged as error:
        return error.why
    checks = (check_file(path, name, expected, checksum=checksum) for name, expected in manifest.files.items())
    return next((why for why in checks if why), None)


def read_meta(path: AnyPath) -> dict[str, Any]:
    """What was saved beside the tensors: step counters, the data state and so on."""
    return read_manifest(path).meta


def newest_good(folder: AnyPath) -> SavedCheckpoint | None:
    """The newest intact checkpoint, for one process that only reads: nothing is changed on disk."""
    for path in reversed(list_checkpoints(folder)):
        if verify(path) is None:
            manifest = read_manifest(path)
            return SavedCheckpoint(manifest.step, path, manifest.meta)
    return None


def begin_folder(folder: AnyPath, step: int, *, damaged: bool) -> tuple[AnyPath, AnyPath | None]:
    """The folder in which a checkpoint of this step is written, and where one that had its name was moved.

    On a disk it has a temporary name until put_in_place(). In a store, where a rename is a copy, it has its final name,
    and counts as a checkpoint once its manifest is there. Then one that is there already is moved aside first.
    """
    if not isinstance(folder, StorePath):
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / aside_name(step, "tmp")
        made.mkdir()
        return made, None
    final, aside = folder / checkpoint_name(step), None
    if (final / MANIFEST).exists():
        aside = final.with_name(aside_name(step, "damaged" if damaged or verify(final, checksum=False) else "old"))
        _move(final, aside)
    remove_tree(final)
    return final, aside


def _move(source: AnyPath, target: AnyPath) -> None:
    """Rename a checkpoint. In a store it is copied and then deleted, so at any moment one of the two is complete."""
    if isinstance(source, StorePath) and isinstance(target, StorePath):
        remove_tree(target, first=MANIFEST)
        copy_tree(source, target, last=MANIFEST)
        remove_tree(source, first=MANIFEST)
    else:
        source.rename(target)  # type: ignore[union-attr, arg-type]


def put_in_place(written: AnyPath, final: AnyPath, *, damaged: bool) -> AnyPath | None:
    """Rename a finished folder to its final name, and return where the one that had the name was moved.

    The old one is moved aside first and is still listed as a checkpoint until the new one has its name, so a kill at
    any moment leaves at least one of the two. damaged: the old one must never be read again.
    """
    if isinstance(written, StorePath) or isinstance(final, StorePath):
        return None  # begin_folder() has moved the former one
    step = int(_NAME.fullmatch(final.name)[1])  # type: ignore[index]
    aside = None
    if final.exists():
        aside = final.with_name(aside_name(step, "damaged" if damaged or verify(final, checksum=False) else "old"))
        final.rename(aside)
    try:
        written.rename(final)
    except OSError:
        if aside is not None:
            aside.rename(final)
        raise
    sync_folder(final.parent)
    return aside


def remove(entry: CheckpointFolder) -> None:
    """Delete a folder. It is renamed first, so that a kill half-way leaves nothing that looks like a checkpoint."""
    path = entry.path
    if isinstance(path, StorePath):
        remove_tree(path, first=MANIFEST)
        return
    if entry.kind != "trash":
        path = path.rename(path.with_name(aside_name(entry.step, "trash")))
    shutil.rmtree(path)


def sync_folder(path: AnyPath) -> None:
    """Make the names in a folder durable, where the filesystem supports it."""
    if isinstance(path, StorePath):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _body_sum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
