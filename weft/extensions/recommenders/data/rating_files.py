"""Files of MovieLens-100k: the original ones (u.data, u.item, u.user), or those of RecBole (ml-100k.inter, …)."""

from __future__ import annotations

import importlib.util
import io
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.data.cache_folder import cache_folder
from weft.job.errors import JobError, MachineError

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
RATINGS = ("u.data", "ml-100k.inter")
MAX_BYTES = 2**30
"""Largest file that is read."""
AGES = (18, 25, 35, 45, 50, 56)
"""Ages at which a new group begins, as in MovieLens-1M."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ratings:
    """Ratings in the order of time, and features of users and items; users and items are counted from 0."""

    users: Ints
    items: Ints
    user_features: dict[str, Ints] = field(default_factory=dict)
    """By name, one id a user."""
    item_features: dict[str, Ints] = field(default_factory=dict)
    """By name, ids [items, most ids of an item], filled up with -1."""
    user_count: int = 0
    item_count: int = 0

    def rows(self) -> dict[str, int]:
        """By feature, the rows that its table needs."""
        known = {"user": self.user_count, "item": self.item_count}
        return known | {n: int(v.max()) + 1 for n, v in (self.user_features | self.item_features).items()}


def find_ratings(folder: Path) -> Path | None:
    """The folder itself, or its subfolder ml-100k, that holds ratings; None where neither does."""
    return next((f for f in (folder, folder / "ml-100k") if any((f / name).is_file() for name in RATINGS)), None)


def is_local(name: str) -> bool:
    """Whether the ratings of this name are on this machine."""
    return local_ratings() is not None


def local_ratings() -> Path | None:
    """The folder of MovieLens-100k on this machine: of RecBole if it is installed, or downloaded earlier."""
    package = importlib.util.find_spec("recbole")
    places = [Path(p) / "dataset_example" for p in (package.submodule_search_locations or ())] if package else []
    return next(
        (found for place in (cache_folder("movielens"), *places) if (found := find_ratings(place)) is not None), None
    )


def named_ratings() -> Path:
    """The folder of MovieLens-100k, which is downloaded if it is not on this machine."""
    if (here := local_ratings()) is not None:
        return here
    cache = cache_folder("movielens")
    try:
        with urllib.request.urlopen(URL, timeout=60) as answer, zipfile.ZipFile(io.BytesIO(answer.read())) as archive:
            cache.mkdir(parents=True, exist_ok=True)
            for name in ("u.data", "u.item", "u.user"):
                (cache / name).write_bytes(archive.read(f"ml-100k/{name}"))
    except (OSError, urllib.error.URLError, zipfile.BadZipFile, KeyError) as error:
        raise MachineError(
            f"data.source movielens is not on this machine and cannot be downloaded ({URL}: {error}); write "
            f"data.source=FOLDER with its files u.data, u.item and u.user, or put them into {cache}"
        ) from None
    return cache


def read_ratings(folder: Path) -> Ratings:
    """The ratings in a folder. Features of users and items are read where their files are there."""
    original = (folder / "u.data").is_file()
    rows = _table(folder / "u.data", "\t") if original else _table(folder / "ml-100k.inter", "\t", header=True)
    if not rows or any(len(row) < 4 or not row[3].replace(".", "", 1).isdigit() for row in rows):
        raise JobError(f"data.source {folder}: its ratings are no lines of user, item, rating and time, with tabs")
    users, user_numbers = _numbered(row[0] for row in rows)
    items, item_numbers = _numbered(row[1] for row in rows)
    order = np.lexsort((items, users, np.array([float(row[3]) for row in rows])))
    return Ratings(
        users[order], items[order], _user_features(folder, original, user_numbers),
        _item_features(folder, original, item_numbers), len(user_numbers), len(item_numbers),
    )  # fmt: skip


def _table(path: Path, separator: str, header: bool = False) -> list[list[str]]:
    if not path.is_file():
        return []
    if path.stat().st_size > MAX_BYTES:
        raise JobError(f"data.source: {path} has {path.stat().st_size} bytes, more than the {MAX_BYTES} that are read")
    lines = path.read_text(encoding="latin-1").splitlines()
    return [line.split(separator) for line in lines[int(header) :] if line.strip()]


def _numbered(names: Iterable[str]) -> tuple[Ints, dict[str, int]]:
    """Names as numbers, and the number of each, in the order of numbers or of the alphabet."""
    found = list(names)
    known = sorted(set(found), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
    numbers = {name: i for i, name in enumerate(known)}
    return np.array([numbers[name] for name in found], dtype=np.int64), numbers


def _user_features(folder: Path, original: bool, numbers: Mapping[str, int]) -> dict[str, Ints]:
    rows = _table(folder / "u.user", "|") if original else _table(folder / "ml-100k.user", "\t", header=True)
    rows = [row for row in rows if row[0] in numbers and len(row) >= 4]
    if not rows:
        return {}
    at = np.array([numbers[row[0]] for row in rows])
    ages = [sum(int(row[1]) >= age for age in AGES) if row[1].isdigit() else 0 for row in rows]
    columns = {"age": np.array(ages), "gender": _numbered(row[2] for row in rows)[0]}
    columns["occupation"] = _numbered(row[3] for row in rows)[0]
    out = {}
    for name, values in columns.items():
        out[name] = np.full(len(numbers), -1, dtype=np.int64)
        out[name][at] = values
    return out


def _item_features(folder: Path, original: bool, numbers: Mapping[str, int]) -> dict[str, Ints]:
    rows = _table(folder / "u.item", "|") if original else _table(folder / "ml-100k.item", "\t", header=True)
    rows = [row for row in rows if row[0] in numbers and len(row) >= 4]
    if not rows:
        return {}
    if original:  # 19 columns of 0 and 1
        genres = [[str(i) for i, flag in enumerate(row[5:]) if flag == "1"] for row in rows]
    else:
        genres = [row[3].split() for row in rows]
    _, known = _numbered(name for names in genres for name in names)
    out = np.full((len(numbers), max(map(len, genres))), -1, dtype=np.int64)
    for row, names in zip(rows, genres, strict=True):
        out[numbers[row[0]], : len(names)] = [known[name] for name in names]
    return {"genres": out}
