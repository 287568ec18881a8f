"""The secret of a run, by which its processes know each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def make_secret(path: Path) -> bytes:
    """The run's secret, made anew, in a file that only its owner can read."""
    secret = secrets.token_bytes(32)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    temporary.replace(path)
    return secret
