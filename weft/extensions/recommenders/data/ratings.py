"""The dataset of ratings: a user, an item that the user has rated, and items that the user has not rated.

The last item of each user is held out, with 99 items that the user has not rated (He et al., 2017).
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np

from weft.extensions.recommenders.data.rating_files import Ints, Ratings, find_ratings, named_ratings, read_ratings
from weft.job.errors import JobError
from weft.job.schema import Job

RATING_SOURCES = ("movielens",)
VAL_NEGATIVES = 99
"""Items beside the held-out one, among which it is ranked."""


def reads_ratings(job: Job) -> bool:
    """Whether data.source is one of ratings: by name, or a folder with their files."""
    source = job.data.source
    if job.data.format is not None:
        return False
    return source in RATING_SOURCES or (Path(source).is_dir() and find_ratings(Path(source)) is not None)


def open_ratings(job: Job) -> RatingDataset:
    """The ratings of data.source."""
    if not job.model.tables:
        raise JobError(
            f"data.source {job.data.source} gives ids of users and items, and the model has no tables; "
            "model.family=dlrm or two_tower with model.tables would work"
        )
    source = job.data.source
    folder = named_ratings() if source in RATING_SOURCES else find_ratings(Path(source))
    assert folder is not None
    return RatingDataset(job, read_ratings(folder))


class RatingDataset:
    """Samples of a user and several candidates: `user` and its features, `item` [candidates] and its features
    [candidates, ids], and a label for each candidate, of which the first is 1."""

    takes_epoch = True

    def __init__(self, job: Job, ratings: Ratings) -> None:
        self._ratings, self._seed, self._negatives = ratings, job.train.seed, job.data.negatives
        self._check_tables(job)
        count = ratings.user_count
        last = np.full(count, -1, dtype=np.int64)
        last[ratings.users] = np.arange(len(ratings.users))  # ratings are in the order of time
        seen = np.bincount(ratings.users, minlength=count)
        self._held = np.sort(last[seen > 1])
        kept = np.ones(len(ratings.users), dtype=np.bool_)
        kept[self._held] = False
        self.kept = np.flatnonzero(kept)
        """Numbers of the ratings that are trained on."""
        order = np.argsort(ratings.users, kind="stable")
        self._rated = [np.unique(items) for items in np.split(ratings.items[order], np.cumsum(seen)[:-1])]
        """The items of each user, rising."""
        if any(len(items) == ratings.item_count for items in self._rated):
            raise JobError(f"data.source {job.data.source}: a user has rated every item, so there is no other to draw")
        self.train_len, self.val_len = len(self.kept), len(self._held)
        self.fingerprint = f"{zlib.crc32(ratings.users.tobytes() + ratings.items.tobytes()):08x}"

    def train(self, index: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """A rated item, with others that are drawn from a generator of (seed, sample, epoch)."""
        return self._sample(int(self.kept[index]), self._negatives, f"{self._seed} {epoch}", index)

    def val(self, index: int) -> dict[str, np.ndarray]:
        """A held-out item with others, which are the same in every run."""
        return self._sample(int(self._held[index]), VAL_NEGATIVES, "val", index)

    def _sample(self, rating: int, negatives: int, key: str, index: int) -> dict[str, np.ndarray]:
        digest = hashlib.blake2b(f"weft ratings {key}".encode(), digest_size=8).digest()
        number = np.array([int.from_bytes(digest, "little"), index], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=number))
        user = int(self._ratings.users[rating])
        items = np.concatenate([self._ratings.items[rating : rating + 1], self._others(user, negatives, random)])
        out: dict[str, np.ndarray] = {"inputs/user": np.asarray(user), "inputs/item": items}
        out |= {f"inputs/{n}": np.asarray(v[user]) for n, v in self._ratings.user_features.items()}
        out |= {f"inputs/{n}": v[items] for n, v in self._ratings.item_features.items()}
        label = np.zeros(negatives + 1, dtype=np.float32)
        label[0] = 1
        return {**out, "targets": label, "valid": np.ones((), dtype=np.bool_)}

    def _others(self, user: int, count: int, random: np.random.Generator) -> Ints:
        """Items that a user has not rated."""
        rated, found = self._rated[user], np.empty(0, dtype=np.int64)
        while len(found) < count:
            drawn = random.integers(0, self._ratings.item_count, 2 * (count - len(found)))
            at = rated.searchsorted(drawn).clip(max=len(rated) - 1)
            found = np.concatenate([found, drawn[rated[at] != drawn]])
        return found[:count]

    def _check_tables(self, job: Job) -> None:
        rows = self._ratings.rows()
        for table in job.model.tables:
            for key in table.keys:
                if key not in rows:
                    raise JobError(
                        f"data.source {job.data.source} has {', '.join(rows)}, and model.tables looks up {key!r}; "
                        "leave that table out, or set its features"
                    )
                if table.rows < rows[key]:
                    raise JobError(
                        f"model.tables: {table.name} has rows={table.rows}, and data.source {job.data.source} has "
                        f"{rows[key]} of {key}; rows={rows[key]} would work"
                    )
