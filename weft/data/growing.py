"""A folder that gets new shards while a run trains or between its starts. Every sample is read once.

Shards that are found together form a round. Rounds follow each other: the samples of a round are shuffled, and the
k-th sample of a run is a function of the seed, k and the rounds, which a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from weft.data.build_sources import TEXT_SUFFIXES
from weft.data.formats.record_files import record_format
from weft.data.sample_order import Ints, SampleOrder
from weft.data.store import crc32, sampled_crc32
from weft.job.data import Data
from weft.job.data_files.token_files import META, TOKENS
from weft.job.errors import JobError

MAX_FULL_CHECKSUM_BYTES = 64 << 20
"""Smaller files are identified by a checksum of all their bytes, others by one of SAMPLED_BLOCKS blocks."""
SAMPLED_BLOCKS = 256

Rounds = list[list[dict[str, Any]]]
"""Of each round its shards: name, fingerprint and number of training samples."""


@runtime_checkable
class FollowsRounds(Protocol):
    """A dataset whose order of samples depends on what a checkpoint holds of it."""

    rounds: Rounds

    def follow(self, rounds: Rounds) -> None: ...


def find_shards(data: Data) -> list[str]:
    """Names of the shards in data.source: token stores that are complete, or with data.format files of records."""
    folder = Path(data.source)
    if not folder.is_dir():
        raise JobError(f"data.growing=true reads the shards in a folder, and data.source {data.source} is none")
    if data.format is None:
        return sorted(path.name for path in folder.iterdir() if (path / META).is_file() and path.name[0] not in "._")
    suffixes = TEXT_SUFFIXES | {".tsv"}
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.name[0] not in "._" and (path.suffix.lower() in suffixes or record_format(path))
    )


def shard_fingerprint(path: Path) -> str:
    """Identifies the contents of a shard: its size and a checksum."""
    file = path / TOKENS if path.is_dir() else path
    size = file.stat().st_size
    if size <= MAX_FULL_CHECKSUM_BYTES:
        return f"{size}-{crc32(file):08x}"
    return f"{size}-{sampled_crc32(file, size, SAMPLED_BLOCKS):08x}"


class GrowingDataset:
    """The shards of a folder, in rounds."""

    def __init__(self, data: Data, open_shard: Callable[[str], Any], order: SampleOrder):
        self._data, self._open, self._order = data, open_shard, order
        self._opened: dict[str, Any] = {}
        self._prints: dict[str, str] = {}
        self.rounds: Rounds = []
        self._shards: list[Any] = []
        self._set([])
        self.add(find_shards(data))
        if not self._shards:
            raise JobError(f"data.source {data.source} has no shard yet; {_expected(data)}")

    def new_shards(self) -> list[str]:
        """Names of shards that no round has."""
        known = {shard["name"] for each in self.rounds for shard in each}
        return [name for name in find_shards(self._data) if name not in known]

    def add(self, names: Sequence[str]) -> None:
        """Add a round of new shards."""
        if names:
            shards = [{"name": n, "fingerprint": self._print(n), "samples": self._shard(n).train_len} for n in names]
            self._set([*self.rounds, shards])

    def follow(self, rounds: Rounds) -> None:
        """Use the rounds of a checkpoint; a JobError names a shard that was changed or removed since."""
        for shard in (shard for each in rounds for shard in each):
            name, source = shard["name"], self._data.source
            path = Path(source) / name
            if Path(name).name != name or not path.exists():
                raise JobError(
                    f"the shard {name} of data.source {source} was removed, and the run has read it; put it back, or "
                    "start a run with another name"
                )
            if self._print(name) != shard["fingerprint"] or self._shard(name).train_len != shard["samples"]:
                raise JobError(
                    f"the shard {name} of data.source {source} was changed, and the run has read it; restore it and "
                    "put new samples into a new shard, or start a run with another name"
                )
        self._set(rounds)

    def _print(self, name: str) -> str:
        if name not in self._prints:
            self._prints[name] = shard_fingerprint(Path(self._data.source) / name)
        return self._prints[name]

    def _shard(self, name: str) -> Any:
        if name not in self._opened:
            self._opened[name] = self._open(str(Path(self._data.source) / name))
        return self._opened[name]

    def _set(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self._shards = [self._shard(shard["name"]) for each in rounds for shard in each]
        self._train = np.cumsum([0, *(shard.train_len for shard in self._shards)])
        self._val = np.cumsum([0, *(shard.val_len for shard in self._shards)])
        self._ends = np.cumsum([sum(shard["samples"] for shard in each) for each in rounds], dtype=np.int64)
        self.train_len, self.val_len = int(self._train[-1]), int(self._val[-1])
        self.padding = getattr(self._shards[0], "padding", None) if self._shards else None

    @property
    def available(self) -> int:
        """Samples that a run can read; there are none after them until a shard is added."""
        return self.train_len

    def train(self, index: int) -> dict[str, np.ndarray]:
        which = int(np.searchsorted(self._train, index, side="right")) - 1
        found: dict[str, np.ndarray] = self._shards[which].train(index - int(self._train[which]))
        return found

    def val(self, index: int) -> dict[str, np.ndarray]:
        which = int(np.searchsorted(self._val, index, side="right")) - 1
        found: dict[str, np.ndarray] = self._shards[which].val(index - int(self._val[which]))
        return found

    def sample_indices(self, seed: int, ids: Ints) -> Ints:
        """The indices of the run's samples with these numbers; those after the last one begin again."""
        ids = ids % max(1, self.train_len)
        out = np.empty(ids.size, dtype=np.int64)
        rounds = np.searchsorted(self._ends, ids, side="right")
        for number in np.unique(rounds):
            here = np.flatnonzero(rounds == number)
            first = int(self._ends[number - 1]) if number else 0
            own = self._order.indices(seed + int(number), ids[here] - first, int(self._ends[number]) - first)
            out[here] = first + own
        return out


def _expected(data: Data) -> str:
    if data.format is None:
        return "put token stores into it, made by `weft data build`, or write data.format for files of records"
    return f"put .jsonl, .parquet or other files of data.format={data.format} into it"
