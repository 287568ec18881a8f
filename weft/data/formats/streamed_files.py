"""Files that are tokenized while a run trains, part by part, instead of all of them before its first step.

Parts (about 8 MiB of whole records) are a function of the files, and so is the number of samples of a part. An epoch
reads the parts in a shuffled order, SHUFFLED_PARTS at a time, whose samples are shuffled together. So the k-th sample
of a run is a function of the seed and k; to find it, the parts before it must have been counted. A checkpoint holds the
counts, and the encoded parts stay in the cache folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.data.build_part import RecordLayout, part_is_complete, part_path, read_part, write_part
from weft.data.build_sources import PART_BYTES, Part, SourceFile, find_files, split_into_parts
from weft.data.build_store import record_layout
from weft.data.cache_folder import cache_folder
from weft.data.formats.record_files import RECORD_FORMATS
from weft.data.growing import Rounds
from weft.data.prepared_files import settings_hash
from weft.data.sample_order import Ints, shuffle
from weft.data.store import sampled_crc32, token_dtype
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.job.data import Data
from weft.job.errors import JobError, MachineError

SHUFFLED_PARTS = {"samples": 8, "blocks": 1, "none": 1}
"""Parts whose samples are shuffled together, by data.shuffle; with none they are read in order."""
VAL_PARTS = 2
"""The held-out samples of so many parts are the validation set; those of others are not read."""
MAX_UNSPLIT_BYTES = {".jsonl.gz": 64 << 20, ".ndjson.gz": 64 << 20, ".jsonl.zst": 64 << 20, ".ndjson.zst": 64 << 20,
                     ".tar.gz": 64 << 20}  # fmt: skip
"""Largest files that can only be read from their start."""
MAX_GROUP_BYTES = 1 << 30
"""Largest group of rows: a part is encoded in memory."""
SAMPLED_BLOCKS = 16
"""Of each file, blocks whose checksum is part of the fingerprint."""
WINDOW_BITS = 32
"""A sample's index is its part shifted by so many bits, and its number in the part."""

OpenPart = Callable[[Any, Any, Any], Any]
"""A dataset of tokens, document offsets and the mask of answers, which may be None."""


class PartGroup(NamedTuple):
    """Parts whose samples are shuffled together, in an epoch of a run."""

    first: int
    """Number of the group's first sample in the run."""
    epoch: int
    number: int
    parts: tuple[int, ...]
    ends: tuple[int, ...]
    """Samples of the parts up to each of them, and it."""


class _NoSamples:
    """A part with no text in it."""

    train_len = val_len = 0


class StreamedDataset:
    """The parts of some files. Ranks of a machine share the encoded parts; each encodes some of them ahead."""

    def __init__(self, data: Data, format: str, open_part: OpenPart) -> None:
        self._data, self._open_part = data, open_part
        files = find_files([data.source], Path(os.devnull))
        _check_positions(files)
        self._parts: list[Part] = split_into_parts(files, PART_BYTES)
        self._layout: RecordLayout = record_layout(files, data.tokenizer, data.field, format, data.template)
        self._tokenizer: Tokenizer = load_tokenizer(data.tokenizer)
        self._dtype = token_dtype(self._tokenizer.vocab)
        self._folder = cache_folder("tokens") / f"{settings_hash(data, data.source, format)}-stream"
        self.fingerprint = _fingerprint(files)
        self.index_limit = len(self._parts) << WINDOW_BITS
        """Indices of samples are below it."""
        fields = (data.seq_len, data.val_fraction, data.mask_documents, data.packing, data.answers_only, data.tokenizer)
        self._settings = hashlib.sha256(repr((fields, self._layout)).encode()).hexdigest()[:8]
        self._counts: dict[int, int] = {}
        self.train_len = 1
        """Samples of the parts counted so far; the length of an epoch once all are."""
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._groups: dict[int, list[PartGroup]] = {}
        self._ahead: threading.Thread | None = None
        self._lock = threading.RLock()
        self.rounds: Rounds = [[]]
        """The number of samples of every part counted so far, as a checkpoint holds it."""
        held_out = VAL_PARTS if data.val_fraction > 0 else 0
        self._val_parts = [self._part(number) for number in range(min(held_out, len(self._parts)))]
        self._val_ends = np.cumsum([0, *(part.val_len for part in self._val_parts)])
        self.val_len = int(self._val_ends[-1])

    def follow(self, rounds: Rounds) -> None:
        """Use the counts of a checkpoint; a JobError if the files were changed since."""
        for shard in (shard for each in rounds for shard in each):
            contents, _, settings = str(shard.get("fingerprint", "")).partition("/")
            if contents != self.fingerprint or not 0 <= int(shard["name"]) < len(self._parts):
                raise JobError(
                    f"data.source {self._data.source} was changed since the checkpoint, so that its samples have other "
                    "numbers; restore its files, or start a run with another name"
                )
            if settings == self._settings and int(shard["name"]) not in self._counts:
                self._count(int(shard["name"]), shard["samples"])

    def train(self, index: int) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = self._part(index >> WINDOW_BITS).train(index & (1 << WINDOW_BITS) - 1)
        return found

    def val(self, index: int) -> dict[str, np.ndarray]:
        which = int(np.searchsorted(self._val_ends, index, side="right")) - 1
        found: dict[str, np.ndarray] = self._val_parts[which].val(index - int(self._val_ends[which]))
        return found

    def sample_indices(self, seed: int, ids: Ints) -> Ints:
        """The indices of the run's samples with these numbers."""
        with self._lock:
            groups = self._groups_until(seed, int(ids.max()))
        at = np.array([bisect_right(groups, int(k), key=lambda group: group.first) - 1 for k in ids])
        out = np.empty(ids.size, dtype=np.int64)
        for number in np.unique(at):
            group, here = groups[number], np.flatnonzero(at == number)
            places = ids[here] - group.first
            if self._data.shuffle != "none":
                places = shuffle((seed << 1) + 1, (group.epoch << 40) + group.number, places, group.ends[-1])
            which = np.searchsorted(group.ends, places, side="right")
            starts = np.array((0, *group.ends))[which]
            out[here] = (np.array(group.parts)[which] << WINDOW_BITS) + places - starts
        last = groups[int(at.max())]
        self._encode_ahead(self._parts_of(seed, *self._after(last.epoch, last.number)))
        return out

    def _groups_until(self, seed: int, sample: int) -> list[PartGroup]:
        """The groups of a run from its first sample to this one."""
        groups = self._groups.setdefault(seed, [])
        epoch, number, first, in_epoch = 0, 0, 0, 0
        if groups:
            last = groups[-1]
            first = last.first + last.ends[-1]
            epoch, number = self._after(last.epoch, last.number)
        while first <= sample:
            if number == 0:
                in_epoch = first
            parts = self._parts_of(seed, epoch, number)
            for part in parts:  # ranks of a machine share the work: each takes the parts that no other one encodes
                if part not in self._counts:
                    self._encode(part, self._tokenizer, wait=False)
            ends = np.cumsum([self._samples_of(part) for part in parts])
            if ends[-1]:
                groups.append(PartGroup(first, epoch, number, parts, tuple(int(end) for end in ends)))
                first += int(ends[-1])
            epoch, number = self._after(epoch, number)
            if number == 0 and first == in_epoch:
                raise JobError(f"data.source {self._data.source} is empty: no part of it has a training sample")
        return groups

    def _after(self, epoch: int, number: int) -> tuple[int, int]:
        """The group that follows one, in the same epoch or the next."""
        count = -(-len(self._parts) // SHUFFLED_PARTS[self._data.shuffle])
        return (epoch, number + 1) if number + 1 < count else (epoch + 1, 0)

    def _parts_of(self, seed: int, epoch: int, number: int) -> tuple[int, ...]:
        size, count = SHUFFLED_PARTS[self._data.shuffle], len(self._parts)
        places = range(number * size, min(count, (number + 1) * size))
        if self._data.shuffle == "none":
            return tuple(places)
        return tuple(shuffle(seed, epoch, place, count) for place in places)

    def _samples_of(self, part: int) -> int:
        if part not in self._counts:
            self._part(part)
        return self._counts[part]

    def _count(self, part: int, samples: int) -> None:
        self._counts[part] = samples
        self.train_len = max(1, sum(self._counts.values()))
        fingerprint = f"{self.fingerprint}/{self._settings}"
        self.rounds[0].append({"name": str(part), "fingerprint": fingerprint, "samples": samples})

    def _part(self, number: int) -> Any:
        """The samples of a part; some that were read last are kept."""
        with self._lock:
            return self._opened.get(number) or self._open(number)

    def _open(self, number: int) -> Any:
        ends, tokens, mask = read_part(self._encode(number, self._tokenizer), self._dtype)
        found: Any = _NoSamples()
        if tokens.size > 1:
            rest = [tokens.size] if not ends.size or ends[-1] != tokens.size else []  # a text that goes on elsewhere
            docs = np.concatenate([[0], ends, np.array(rest, dtype=np.int64)]).astype(np.int64)
            found = self._open_part(tokens, docs, mask if self._layout.masked else None)
        if number not in self._counts:
            self._count(number, found.train_len)
        self._opened[number] = found
        while len(self._opened) > 2 * SHUFFLED_PARTS[self._data.shuffle]:
            self._opened.popitem(last=False)
        return found

    def _encode(self, number: int, tokenizer: Tokenizer, wait: bool = True) -> Path:
        """Write an encoded part unless it is there; without `wait`, unless another process is writing it."""
        path = part_path(self._folder, number)
        if part_is_complete(path, self._dtype, self._layout.masked):
            return path
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock_path = path.with_suffix(".lock")
            with lock_path.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not part_is_complete(path, self._dtype, self._layout.masked):
                    write_part(path, self._parts[number], tokenizer, self._layout)
                lock_path.unlink(missing_ok=True)
        except BlockingIOError:
            return path
        except OSError as error:
            raise MachineError(
                f"data.source {self._data.source} cannot be tokenized into {self._folder}: {error}"
            ) from error
        return path

    def _encode_ahead(self, parts: Sequence[int]) -> None:
        """Encode the next parts in a thread; other ranks of the machine encode those that this one does not."""
        if self._ahead is not None and self._ahead.is_alive():
            return
        missing = [
            p for p in parts if not part_is_complete(part_path(self._folder, p), self._dtype, self._layout.masked)
        ]
        if missing:
            self._ahead = threading.Thread(target=self._encode_all, args=(missing,), name="weft-encode", daemon=True)
            self._ahead.start()

    def _encode_all(self, parts: Sequence[int]) -> None:
        try:
            tokenizer = load_tokenizer(self._data.tokenizer)  # threads cannot share one
            for part in parts:
                self._encode(part, tokenizer, wait=False)
        except (JobError, MachineError):
            return  # raised again where the part is needed


def _check_positions(files: Sequence[SourceFile]) -> None:
    """Refuse files whose records cannot be reached without reading all of those before them."""
    for file in files:
        if file.kind in MAX_UNSPLIT_BYTES and file.size > MAX_UNSPLIT_BYTES[file.kind]:
            raise JobError(
                f"data.streaming=true cannot position a run in {file.path}: a compressed file is read from its start, "
                f"and it has more than {MAX_UNSPLIT_BYTES[file.kind] >> 20} MiB; split it, write .jsonl or .parquet, "
                "or leave data.streaming out"
            )
    for part in split_into_parts([file for file in files if file.kind in RECORD_FORMATS], PART_BYTES):
        for rows in part:
            if rows.size > MAX_GROUP_BYTES:
                raise JobError(
                    f"data.streaming=true cannot position a run in {rows.path}: a group of its rows has "
                    f"{rows.size >> 20} MiB; write smaller row groups, or leave data.streaming out"
                )


def _fingerprint(files: Sequence[SourceFile]) -> str:
    """Identifies the contents of the files, wherever they are: sizes, names and checksums of some blocks."""
    value = 0
    for file in files:
        value = zlib.crc32(f"{Path(file.path).name} {file.size}".encode(), value)
        value = sampled_crc32(Path(file.path), file.size, SAMPLED_BLOCKS, value)
    return f"{value:08x}"
