"""The format of snapshot files: their header, and reading them without torch."""

from __future__ import annotations

import json
import mmap
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"weftsnap"
HEAD = struct.Struct("<8sQQQQ")  # magic, sealed step + 1, offset of the tensors, length and checksum of the JSON
SEAL = struct.Struct("<Q")

OWN_PREFIXES = ("residual.", "powersgd.", "dice.", "random")
"""Prefixes of tensors that no other rank holds: compression residuals and random states."""

_NAME = re.compile(r"snap-(\d+)\.\d+")


@dataclass(frozen=True)
class SealedSnapshot:
    """A complete snapshot of one rank."""

    path: Path
    rank: int
    step: int

    def copy(self) -> bytes | None:
        """The file's content, or None where its rank has begun to overwrite it with a newer step."""
        try:
            with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                content = memory[:]
                same = SEAL.unpack_from(memory, 8)[0] == self.step + 1 == SEAL.unpack_from(content, 8)[0]
        except (OSError, ValueError, struct.error):
            return None
        return content if same else None


def own_tensors(content: bytes) -> bytes:
    """A snapshot file with only the tensors that no other rank holds."""
    magic, sealed, head, length, _ = HEAD.unpack_from(content)
    table = json.loads(content[HEAD.size : HEAD.size + length])
    ends = [entry[3] for entry in table["tensors"][1:]] + [len(content)]
    entries, parts, at = [], [], head
    for (name, dtype, shape, start), end in zip(table["tensors"], ends, strict=True):
        if name.startswith(OWN_PREFIXES):
            entries.append((name, dtype, shape, at))
            parts.append(content[start:end])
            at += end - start
    text = json.dumps({**table, "tensors": entries}).encode()
    start_of_file = HEAD.pack(magic, sealed, head, len(text), zlib.crc32(text)) + text
    return b"".join([start_of_file.ljust(head, b"\0"), *parts])


def sealed_step(path: Path) -> int | None:
    """The step of a complete snapshot; None where it is not complete."""
    try:
        with path.open("rb") as file:
            magic, sealed, _, _, _ = HEAD.unpack(file.read(HEAD.size))
    except (OSError, struct.error):
        return None
    return sealed - 1 if magic == MAGIC and sealed else None


def find_sealed(folder: Path) -> list[SealedSnapshot]:
    """Every complete snapshot in a folder."""
    found = []
    for path in folder.glob("snap-*"):
        if (name := _NAME.fullmatch(path.name)) and (step := sealed_step(path)) is not None:
            found.append(SealedSnapshot(path, int(name[1]), step))
    return found


def read_table(path: Path) -> tuple[list[tuple[str, str, list[int], int]], dict[str, Any]] | None:
    """The tensors of a file (name, dtype, shape, offset) and the metadata of its step; None if it is not complete."""
    try:
        with path.open("rb") as file:
            magic, sealed, head, length, crc = HEAD.unpack(file.read(HEAD.size))
            text = file.read(min(length, head))
        if magic != MAGIC or not sealed or zlib.crc32(text) != crc:
            return None
        content = json.loads(text)
        return [(str(n), str(d), [int(x) for x in s], int(at)) for n, d, s, at in content["tensors"]], content["meta"]
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


@dataclass(frozen=True)
class SnapshotLayout:
    """The layout that the snapshots of a rank belong to, which is needed to merge them under another one."""

    rank: int
    attempt: int
    job: dict[str, Any]
    plan: dict[str, Any]
    boxes: dict[str, tuple[list[int], list[int]]]
    """By tensor: the shape of the full tensor, and the offset of the shard."""

    def dumps(self) -> str:
        return json.dumps(vars(self))

    def write(self, folder: Path) -> None:
        draft = folder / f".places-{self.rank}"
        draft.write_text(self.dumps(), encoding="utf-8")
        draft.replace(folder / f"places-{self.rank}.json")

    @classmethod
    def loads(cls, text: str) -> SnapshotLayout | None:
        try:
            data = json.loads(text)
            boxes = {str(n): ([int(x) for x in s], [int(x) for x in o]) for n, (s, o) in data["boxes"].items()}
            return cls(int(data["rank"]), int(data["attempt"]), dict(data["job"]), dict(data["plan"]), boxes)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def read(cls, path: Path) -> SnapshotLayout | None:
        try:
            return cls.loads(path.read_text(encoding="utf-8"))
        except OSError:
            return None
