"""Files of the queue: written atomically, readable by every user, changed by their owner only.

Every user may create files in its folders, so what is read there is checked: a pipe would block all users.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

READABLE = 0o644
MAX_BYTES = 1 << 20
"""Larger files are damaged."""


def open_public(path: Path) -> int:
    """Open a file for reading without waiting; an OSError if it is a link or not a regular file."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return handle


def read_public(path: Path, uid: int) -> bytes:
    """The content of a file of a user; an OSError if another user has made it, or it is too large."""
    with os.fdopen(open_public(path), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (uid, 0) or status.st_size > MAX_BYTES:
            raise OSError(f"{path} belongs to another user or is too large")
        return file.read(MAX_BYTES)


def write_public(path: Path, text: str, uid: int | None = None, mode: int = READABLE) -> None:
    """Replace a file. `uid`: its owner, where root writes for a user."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            if uid is not None and uid != os.geteuid():
                os.fchown(file.fileno(), uid, -1)
            file.write(text)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
