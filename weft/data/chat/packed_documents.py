"""Samples of whole documents: several short ones share a sample, and attention does not cross from one to another."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from weft.data.file_array import FileArray
from weft.data.sample_order import shuffle
from weft.data.tokenizer import Tokens
from weft.job.errors import JobError

ORDER_SEED = 0
"""Seed of the order of samples before some are held out: packing sorts documents by length."""

READ_TOKENS = 1 << 24
"""Tokens of the mask that are read at a time."""


def pack(lengths: NDArray[np.int64], size: int) -> list[list[int]]:
    """Documents grouped so that the lengths of a group sum to at most `size`: best fit, longest first."""
    groups: list[list[int]] = []
    open_groups: dict[int, list[int]] = {}
    rooms: list[int] = []  # the sorted keys of open_groups
    for doc in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[doc])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            groups.append([doc])
            room, group = size - length, len(groups) - 1
        else:
            fits = rooms[at]
            group = open_groups[fits].pop()
            if not open_groups[fits]:
                del open_groups[fits], rooms[at]
            groups[group].append(doc)
            room = fits - length
        if room:
            if room not in open_groups:
                insort(rooms, room)
            open_groups.setdefault(room, []).append(group)
    return groups


class PackedDocuments:
    """Samples of `seq_len` tokens, each of one or several whole documents.

    Documents longer than a sample are cut at its end, and those without a target left are left out. `mask` is 1 for
    tokens that are targets; None: all are. Without `packing` a sample is one document.
    """

    def __init__(
        self, tokens: Tokens | FileArray, docs: NDArray[np.int64] | FileArray,
        mask: NDArray[np.uint8] | FileArray | None, *,
        seq_len: int, val_fraction: float, packing: bool, vocab: int, eos: int, name: str, fingerprint: str,
    ) -> None:  # fmt: skip
        self._tokens, self._mask, self._seq_len, self._vocab, self._eos = tokens, mask, seq_len, vocab, eos
        self._name, self.fingerprint, self._packing = name, fingerprint, packing
        offsets = np.asarray(docs[:])
        if (np.diff(offsets) < 0).any():
            raise JobError(f"data.source {name} is damaged: its documents are not in order")
        self._starts = offsets[:-1]
        self._lengths = np.minimum(np.diff(offsets) - 1, seq_len)  # the last token is only a target
        used = np.flatnonzero((self._lengths > 0) & self._has_target())
        if not used.size:
            raise JobError(
                f"data.source {name} has no answer in the first {seq_len} tokens of any document; raise data.seq_len"
            )
        groups = pack(self._lengths[used], seq_len) if packing else [[i] for i in range(used.size)]
        order = shuffle(ORDER_SEED, 0, np.arange(len(groups)), len(groups)) if packing else range(len(groups))
        self._groups = [used[groups[i]] for i in order]
        count = len(self._groups)
        self.val_len = min(count - 1, max(1, round(count * val_fraction))) if val_fraction > 0 else 0
        self.train_len = count - self.val_len

    def _has_target(self) -> NDArray[np.bool_]:
        """Which documents have a target within their length."""
        if self._mask is None:
            return np.ones(self._starts.size, dtype=np.bool_)
        found = np.zeros(self._starts.size, dtype=np.bool_)
        first = 0
        while first < found.size:  # some documents at a time: a store may be larger than memory
            start = int(self._starts[first])
            end = max(first + 1, int(np.searchsorted(self._starts, start + READ_TOKENS)))
            stop = int(self._starts[end - 1] + self._lengths[end - 1] + 1)
            sums = np.concatenate([[0], np.cumsum(np.asarray(self._mask[start:stop]) > 0)])
            begins = self._starts[first:end] - start + 1
            found[first:end] = sums[begins + self._lengths[first:end]] > sums[begins]
            first = end
        return found

    def train(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(index, self.train_len, 0)

    def val(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(index, self.val_len, self.train_len)

    def _sample(self, index: int, length: int, first: int) -> dict[str, np.ndarray]:
        if not 0 <= index < length:
            raise IndexError(f"sample {index} is not in range({length})")
        size = self._seq_len
        sample: dict[str, np.ndarray] = {
            "inputs": np.full(size, self._eos, dtype=np.int64), "targets": np.full(size, self._eos, dtype=np.int64),
            "valid": np.zeros(size, dtype=np.bool_), "docs": np.zeros(size, dtype=np.int64),
            "positions": np.zeros(size, dtype=np.int64),
        }  # fmt: skip
        at, number = 0, 0
        for number, doc in enumerate(self._groups[first + index]):
            start, count = int(self._starts[doc]), int(self._lengths[doc])
            tokens = np.asarray(self._tokens[start : start + count + 1]).astype(np.int64)
            if int(tokens.max()) >= self._vocab:
                raise JobError(
                    f"data.source {self._name} is damaged: token {int(tokens.max())} in a vocabulary of {self._vocab}"
                )
            here = slice(at, at + count)
            sample["inputs"][here], sample["targets"][here] = tokens[:-1], tokens[1:]
            answers = None if self._mask is None else np.asarray(self._mask[start + 1 : start + count + 1]) > 0
            sample["valid"][here] = True if answers is None else answers
            sample["docs"][here], sample["positions"][here] = number, np.arange(count)
            at += count
        if not self._packing:  # causal attention does not see padding at the end: it needs no mask
            del sample["docs"], sample["positions"]
            return sample
        sample["docs"][at:] = number + 1
        sample["positions"][at:] = np.arange(size - at)
        return sample
