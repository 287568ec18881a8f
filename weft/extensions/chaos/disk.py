"""The disk of a chaos experiment: a small file system that can be filled, and damage to checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir

MIN_DISK_BYTES = 64 << 20
"""Minimum size of the disk; otherwise a multiple of the undisturbed run's size."""


class Disk:
    """The folder of the disturbed run; a separate tmpfs if the disk is to be filled."""

    def __init__(self, path: Path, like: RunDir | None, small: bool):
        self.path, self.small = path, small
        held = sum(p.stat().st_size for p in like.path.rglob("*") if p.is_file()) if like else 0
        self.bytes = max(MIN_DISK_BYTES, 4 * held)
        self.ballast = path / ".ballast"

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        if self.small:
            command = ["mount", "-t", "tmpfs", "-o", f"size={self.bytes}", "weft-chaos", str(self.path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise MachineError(
                    "the fault diskfull needs a small file system of its own, which only root may mount: "
                    f"{done.stderr.strip()}; leave diskfull out, or run as root"
                )
        return self

    def fill(self) -> None:
        """Fill the disk."""
        block = bytes(1 << 20)
        with self.ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                if file.write(block) < len(block):
                    block = block[: max(1, len(block) // 2)]

    def free(self) -> None:
        """Free the space again."""
        self.ballast.unlink(missing_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Copy the run back to the original file system."""
        if not self.small:
            return
        kept = self.path.with_name(self.path.name + ".kept")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.path, kept, symlinks=True)
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()
        kept.rename(self.path)


def damage(checkpoint: Path, moment: float) -> str:
    """Damage a checkpoint: truncate a file, flip a bit, or remove its manifest."""
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size)
    biggest = max(files, key=lambda p: p.stat().st_size)
    size = biggest.stat().st_size
    way = ("truncated", "bit flipped", "half-written")[int(moment * 3)]
    if way == "truncated":
        os.truncate(biggest, size // 2)
    elif way == "bit flipped":
        with biggest.open("r+b") as file:
            file.seek(size // 2)
            byte = file.read(1)
            file.seek(size // 2)
            file.write(bytes([byte[0] ^ 0x10]))
    else:
        for manifest in checkpoint.glob("*.json"):
            manifest.unlink()
    return way
