"""The folder in which torch.compile keeps compiled code: one per user and torch version, shared by all runs.

Its entries are keyed by the compiled graph, and written atomically, so ranks and runs can use it at the same time. It
can be deleted at any time. TORCHINDUCTOR_CACHE_DIR overrides it.
"""

from __future__ import annotations

import os
import stat
import sys
from importlib.metadata import version
from pathlib import Path

from weft.data.cache_folder import cache_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def set_compile_cache(fallback: Path | None) -> None:
    """Set the folder for this process, before it imports torch. `fallback` is used where the user's own folder cannot
    be written, or could be written by others: what is in it is executed. Without one, nothing is set there."""
    if VARIABLE not in os.environ:
        folder = compile_cache()
        chosen = folder if _is_private(folder) else fallback
        if chosen is not None:
            os.environ[VARIABLE] = str(chosen.absolute())


def compile_cache() -> Path:
    """~/.cache/weft/compiled/torch-X-python-Y, or below XDG_CACHE_HOME."""
    name = f"torch-{version('torch')}-python-{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder("compiled") / name


def _is_private(folder: Path) -> bool:
    """Make the folder. Returns whether it and its parents in the cache can be written by this user only."""
    try:
        for path in (folder.parents[1], folder.parent, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return False
        return os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False
