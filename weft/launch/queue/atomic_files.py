"""Files of the queue: written atomically, readable by every user, changed by their owner only."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

READABLE = 0o644


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
