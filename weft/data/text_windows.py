"""Samples of text: windows of seq_len tokens from documents laid end to end."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from weft.data.file_array import FileArray
from weft.data.tokenizer import Tokens
from weft.job.errors import JobError


class TextDataset:
    """Window w reads tokens[w × S : w × S + S + 1]: S inputs, and as targets the tokens that follow them.

    The last windows are held out. A window's targets belong to no other window.
    """

    def __init__(
        self, tokens: Tokens | FileArray, docs: NDArray[np.int64] | FileArray, *, seq_len: int, val_fraction: float,
        mask_documents: bool, vocab: int, eos: int, name: str, fingerprint: str = "",
    ) -> None:  # fmt: skip
        targets = tokens.size - docs.size + 1 if mask_documents else tokens.size - 1
        if targets < 1:
            within = " inside a document" if mask_documents else ""
            raise JobError(f"data.source {name} is empty: it has no token that follows another one{within}")
        self._tokens, self._docs, self._seq_len, self._vocab, self._eos = tokens, docs, seq_len, vocab, eos
        self._mask_documents, self._name = mask_documents, name
        self.fingerprint = fingerprint
        windows = max(1, (tokens.size - 1) // seq_len)
        held_out = min(windows - 1, max(1, round(windows * val_fraction))) if val_fraction > 0 else 0
        self.train_len = windows - held_out
        self.val_len = held_out

    def train(self, index: int) -> dict[str, np.ndarray]:
        return self._window(_inside(index, self.train_len))

    def val(self, index: int) -> dict[str, np.ndarray]:
        return self._window(self.train_len + _inside(index, self.val_len))

    def _window(self, window: int) -> dict[str, np.ndarray]:
        length, start = self._seq_len, window * self._seq_len
        there = self._tokens[start : start + length + 1]
        if int(there.max()) >= self._vocab:
            raise JobError(
                f"data.source {self._name} is damaged: token {int(there.max())} in a vocabulary of {self._vocab}"
            )
        tokens = np.full(length + 1, self._eos, dtype=np.int64)
        tokens[: there.size] = there
        valid = np.arange(1, length + 1) < there.size
        sample: dict[str, np.ndarray] = {"inputs": tokens[:-1], "targets": tokens[1:], "valid": valid}
        if self._mask_documents:
            begins = self._begins(start, there.size)
            sample["valid"] = valid & ~begins[1:]
            sample["docs"] = np.cumsum(begins[:-1], dtype=np.int64)
            at = np.arange(length, dtype=np.int64)
            sample["positions"] = at - np.maximum.accumulate(np.where(begins[:-1], at, 0))
        return sample

    def _begins(self, start: int, size: int) -> NDArray[np.bool_]:
        """Mask of tokens that begin a document, after the window's first token; padding counts as a document."""
        begins = np.zeros(self._seq_len + 1, dtype=np.bool_)
        first, last = bisect_right(self._docs, start), bisect_right(self._docs, start + size - 1)
        begins[self._docs[first:last] - start] = True
        if size <= self._seq_len:
            begins[size] = True
        return begins


def _inside(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"sample {index} is not in range({length})")
    return index
