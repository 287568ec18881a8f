"""Tensors of a checkpoint that may repeat others, such as a head that is tied to the embedding.

As in transformers, they are tied if the config says so and their values are equal, or if the files have one of them.
Does not need torch, but for .bin files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.extensions.pretrained.checkpoint_folder import weight_files
from weft.extensions.pretrained.family_entry import PretrainedFamily
from weft.job.errors import JobError
from weft.job.files.checked_files import MAX_JSON_BYTES

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a file of safetensors."""

    file: Path
    dtype: str
    shape: list[int]
    begin: int
    end: int


class _Tensors:
    """The tensors of a folder by name, compared without reading others."""

    def __init__(self, folder: Path):
        self.folder, self.files = folder, weight_files(folder)
        self.headers: dict[str, dict[str, Any]] = {}
        self.is_bin = self.files.format != "safetensors"

    def file_of(self, name: str) -> str | None:
        """The file that holds a tensor."""
        if self.files.listed is not None:
            return self.files.listed.get(name)
        return self.files.files[0] if name in self._header(self.files.files[0]) else None

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and values."""
        if self.is_bin:
            from weft.extensions.pretrained.weight_file import equal_tensors

            pairs = [(self.folder / str(self.file_of(name)), name) for name in (one, other)]
            return equal_tensors(pairs[0], pairs[1], self.files.format)
        a, b = self._place(one), self._place(other)
        if a is None or b is None or (a.dtype, a.shape, a.end - a.begin) != (b.dtype, b.shape, b.end - b.begin):
            return False
        with a.file.open("rb") as first, b.file.open("rb") as second:
            first.seek(a.begin)
            second.seek(b.begin)
            left = a.end - a.begin
            while left > 0:
                size = min(left, _BLOCK_BYTES)
                if first.read(size) != second.read(size):
                    return False
                left -= size
        return True

    def _header(self, file: str) -> dict[str, Any]:
        """The names of a file and what its header says of each; nothing of a damaged one, which the reader refuses."""
        if file not in self.headers:
            if self.is_bin:
                from weft.extensions.pretrained.weight_file import open_file

                with open_file(self.folder / file, self.files.format) as opened:
                    self.headers[file] = dict.fromkeys(opened.names)
            else:
                self.headers[file] = _safetensors_header(self.folder / file)
        return self.headers[file]

    def _place(self, name: str) -> _Place | None:
        file = str(self.file_of(name))
        entry, start = self._header(file).get(name), self._header(file).get("", 0)
        try:
            begin, end = entry["data_offsets"]  # type: ignore[index]
            return _Place(self.folder / file, entry["dtype"], entry["shape"], start + int(begin), start + int(end))  # type: ignore[index]
        except (KeyError, TypeError, ValueError):
            return None


def _safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a file of safetensors; under the empty name, where its tensors begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, MAX_JSON_BYTES)).decode("utf-8"))
        except (ValueError, RecursionError):
            return {}
    return {**header, "": 8 + size} if isinstance(header, dict) else {}


def is_tied(folder: Path, family: PretrainedFamily, tied: bool) -> bool:
    """Whether the head of a checkpoint is its embedding, where the config says `tied`. A JobError names two other
    tensors that transformers ties and that differ."""
    if not tied and not family.always_tied:
        return False
    try:
        tensors = _Tensors(folder)
    except JobError:  # a plan needs only the config; the reader says what is wrong with the weights
        return tied
    for one, other in family.repeats.items():
        if (names := _both(tensors, family, one, other)) and not tensors.equal(*names):
            raise JobError(f"{folder} holds {names[0]} and {names[1]} with different values, which Weft has only once")
    names = _both(tensors, family, *family.head) if family.head else None
    return names is None or tensors.equal(*names)


def _both(tensors: _Tensors, family: PretrainedFamily, *wanted: str) -> tuple[str, str] | None:
    """The names of two tensors in the files, which may leave the prefix out; None unless both are there."""
    found = [
        next((n for n in (name, name.removeprefix(family.prefix)) if tensors.file_of(n) is not None), None)
        for name in wanted
    ]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None
