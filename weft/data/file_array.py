"""A read-only array in a file, read with pread: a file that shrinks under a run gives an error, not a bus error."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, overload

import numpy as np

from weft.job.errors import JobError, MachineError


class FileArray:
    """One-dimensional; slices are copies. Any number of processes and threads may read the same file."""

    def __init__(self, path: Path, dtype: np.dtype[Any], size: int, first: int = 0) -> None:
        self.path, self.dtype, self.size, self.first = path, dtype, size, first
        """`first` is the index in the file of the first element."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> np.ndarray: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            return self._read(start, max(0, stop - start))[::step] if step > 0 else self[:][index]
        place = int(index) + (self.size if index < 0 else 0)
        if not 0 <= place < self.size:
            raise IndexError(f"index {index} is out of range for {self.size} elements")
        return self._read(place, 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def _read(self, start: int, count: int) -> np.ndarray:
        out = np.empty(count, self.dtype)
        view, at = out.view(np.uint8).data, (self.first + start) * self.dtype.itemsize
        while view:
            try:
                done = os.preadv(self._file, [view], at)
            except OSError as error:
                raise MachineError(f"{self.path} cannot be read: {error.strerror}") from error
            if not done:
                raise JobError(
                    f"{self.path} became shorter while it was read: it ends at byte {at:,} and should have "
                    f"{(self.first + self.size) * self.dtype.itemsize:,}; restore it or build the store again"
                )
            view, at = view[done:], at + done
        return out
