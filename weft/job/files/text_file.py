"""Small text files that a person wrote: jobs, configurations, catalogs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from weft.job.errors import JobError

MAX_BYTES = 2**22


def read_small_text(path: Path, what: str = "") -> str:
    """The text of a file; a JobError, which names it `what`, if it is not a regular UTF-8 file of at most MAX_BYTES."""
    what = what or str(path)
    try:
        if not path.is_file():  # a named pipe would block
            raise JobError(f"{what}: no such file")
        if path.stat().st_size > MAX_BYTES:
            raise JobError(f"{what} has more than {MAX_BYTES // 2**20} MiB, which is too large")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise JobError(f"{what} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise JobError(f"{what} cannot be read: {error.strerror}") from None


FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Safe YAML by libyaml, where it is available."""

MAX_YAML_DEPTH = 50
"""Nesting of a YAML file."""


def limit_nesting(text: str | bytes) -> None:
    """Raise a RecursionError if a YAML text is nested deeper than any of Weft's: libyaml would exhaust the stack."""
    depth = 0
    for event in yaml.parse(text, Loader=FAST_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise RecursionError(f"it is nested deeper than {MAX_YAML_DEPTH} levels")
