"""Several files under one name, as WebDataset and shells write them: shard-{000..007}.tar, {train,val}.tar."""

from __future__ import annotations

import re
from pathlib import Path

from weft.job.errors import JobError

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
MAX_FILES = 1_000_000


def expand(path: Path) -> list[Path]:
    """The files that a path with braces names, in their order; without braces, or if there is such a file, itself."""
    if path.exists() or _BRACES.search(str(path)) is None:
        return [path]
    names = [str(path)]
    while (found := _BRACES.search(names[0])) is not None:
        values = _values(path, *found.groups())
        if len(values) * len(names) > MAX_FILES:
            raise JobError(f"{path} names more than {MAX_FILES:,} files; write a smaller range")
        names = [_BRACES.sub(lambda _, value=value: value, name, count=1) for name in names for value in values]  # type: ignore[misc]
    return [Path(name) for name in names]


def _values(path: Path, first: str | None, last: str | None, words: str | None) -> list[str]:
    if first is None or last is None:
        return (words or "").split(",")
    if not int(first) <= int(last) < int(first) + MAX_FILES:
        raise JobError(
            f"{path} has the range {first}..{last}; write the first number, .. and the last, as in {{000..007}}"
        )
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]


def first_missing(path: Path) -> Path | None:
    """The path if there is no such file or folder, or the first file of a pattern that is missing."""
    return next((each for each in expand(path) if not each.exists()), None)


def folder_of(path: Path) -> Path:
    """The folder from which the files of a source are named: itself, that of a file, or the last one without braces."""
    if path.is_dir():
        return path
    while _BRACES.search(str(path)) is not None:
        path = path.parent
    return path if path.is_dir() else path.parent
