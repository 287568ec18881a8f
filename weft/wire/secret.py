"""The secret of a run, with which its processes authenticate each other."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from weft.job.errors import MachineError
from weft.job.files.store_path import AnyPath, create, replace

MIN_BYTES = 32


def share_secret(shared: AnyPath, folder: Path) -> None:
    """Give this node, whose run folder is not shared, the secret that the first node creates in the store."""
    if "WEFT_SECRET" not in os.environ:
        create(shared / ".secret", secrets.token_hex(32).encode())
        replace(folder / ".secret", (shared / ".secret").read_bytes())


def run_secret(folder: Path) -> bytes:
    """The secret of a run: WEFT_SECRET, or a file readable only by its owner, created by the first process."""
    if given := os.environ.get("WEFT_SECRET"):
        if len(given) < MIN_BYTES:
            raise MachineError(
                f"WEFT_SECRET has {len(given)} characters; at least {MIN_BYTES} are needed (openssl rand -hex 32)"
            )
        return given.encode()
    path = folder / ".secret"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        create(path, secrets.token_hex(32).encode())
    mode = path.lstat()
    if not stat.S_ISREG(mode.st_mode) or mode.st_mode & 0o077 or mode.st_uid != os.geteuid():
        raise MachineError(f"{path} must be a regular file that only you can read: chmod 600 it, or delete it")
    secret = path.read_bytes()
    if len(secret) < MIN_BYTES:
        raise MachineError(f"{path} holds {len(secret)} bytes, fewer than {MIN_BYTES}; delete the file")
    return secret
