"""The user's folder for what can be made or downloaded again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """~/.cache/weft/NAME, or below XDG_CACHE_HOME."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root).absolute() / "weft" / name
