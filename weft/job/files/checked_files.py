"""The files of a checkpoint's folder, which may come from anyone: no link leads out of the folder, and each is a
regular file. Does not need torch."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

from weft.job.errors import JobError

MAX_JSON_BYTES = 256 << 20
"""Larger files are neither a config, an index nor a tokenizer."""
_BLOB = re.compile(r"[0-9a-f]{40,64}")
"""Names of files in the blobs of the hub cache: their SHA-1 or SHA-256."""


def checked_file(path: Path, folder: Path | None = None, most: int | None = None) -> Path | None:
    """The path of a regular file that lies in `folder` (default: the folder of the path) or, as links of the hub cache
    do, in its blobs; None if nothing is there. A JobError says what else it is, or that it has more than `most` bytes.
    """
    folder = path.parent if folder is None else folder
    try:
        path.lstat()
        real = path.resolve(strict=True)
        info = real.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.is_symlink():
            return None
        raise JobError(f"{path} is a link to a file that does not exist; download it again") from error
    except (OSError, RuntimeError) as error:
        raise JobError(f"{path} cannot be read: it is a link to itself or lies in a folder of others") from error
    inside = folder.resolve()
    if not real.is_relative_to(inside) and not _is_blob(real, inside):
        raise JobError(f"{path} is a link to {real}, which is not in its folder; put a copy of the file there instead")
    if not stat.S_ISREG(info.st_mode):
        raise JobError(f"{path} is not a regular file; put a copy of the file there instead")
    if most is not None and info.st_size > most:
        raise JobError(f"{path} has {info.st_size:,} bytes, more than the {most:,} that such a file may have")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a JobError says what is wrong with it."""
    checked_file(path, most=MAX_JSON_BYTES)
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        raise JobError(f"{path} is not JSON: it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise JobError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise JobError(f"{path} is not JSON: it is nested too deeply") from None
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # such as a number with more digits than Python reads
        raise JobError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise JobError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _is_blob(real: Path, folder: Path) -> bool:
    """Whether a file is a blob of the cached repository whose snapshot holds the folder."""
    snapshot = next((p for p in (folder, *folder.parents) if p.parent.name == "snapshots"), None)
    return snapshot is not None and real.parent == snapshot.parent.parent / "blobs" and bool(_BLOB.fullmatch(real.name))
