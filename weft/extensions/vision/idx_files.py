"""The original files of MNIST and its relatives: idx, plain or gzipped, from a folder or downloaded."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.data.cache_folder import cache_folder
from weft.job.errors import JobError, MachineError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
URLS = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "fashion-mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
}
"""Where the files can be downloaded."""
PLACES = {"mnist": ("/usr/share/datasets/mnist",), "fashion-mnist": ("/usr/share/datasets/fashion-mnist",)}
"""Folders in which distributions install them."""
FOLDERS = (".", "raw", "MNIST/raw", "FashionMNIST/raw", "data")
MAX_BYTES = 2**32
"""Largest file that is read."""


def find_idx(folder: Path) -> dict[str, Path] | None:
    """The four files in a folder, or in one of its usual subfolders; None where they are not all there."""
    for inner in FOLDERS:
        found = {name: path for name in FILES if (path := _existing(folder / inner, name)) is not None}
        if len(found) == len(FILES):
            return found
    return None


def _existing(folder: Path, name: str) -> Path | None:
    spelled = (name, name.replace("-idx", ".idx"))
    options = [folder / f"{each}{end}" for each in spelled for end in ("", ".gz")]
    return next((path for path in options if path.is_file()), None)


def local_idx(name: str) -> dict[str, Path] | None:
    """The files of mnist or fashion-mnist on this machine: installed, or downloaded earlier."""
    found = (find_idx(folder) for folder in (cache_folder(name), *map(Path, PLACES[name])))
    return next((files for files in found if files is not None), None)


def is_local(name: str) -> bool:
    """Whether the files of mnist or fashion-mnist are on this machine."""
    return local_idx(name) is not None


def named_idx(name: str) -> dict[str, Path]:
    """The files of mnist or fashion-mnist, which are downloaded if they are not on this machine."""
    if (here := local_idx(name)) is not None:
        return here
    cache, problem = cache_folder(name), ""
    for url in URLS[name]:
        try:
            _download(url, cache)
        except (OSError, urllib.error.URLError) as error:
            problem = f"{url}: {error}"
            continue
        if (found := find_idx(cache)) is not None:
            return found
    raise MachineError(
        f"data.source {name} is not on this machine and cannot be downloaded ({problem}); write data.source=FOLDER "
        f"with the files {FILES[0]}.gz, …, or put them into {cache}"
    )


def _download(url: str, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if _existing(cache, name) is None:
            with (
                urllib.request.urlopen(f"{url}{name}.gz", timeout=60) as answer,
                tempfile.NamedTemporaryFile(dir=cache, delete=False) as file,
            ):
                shutil.copyfileobj(answer, file)
            os.replace(file.name, cache / f"{name}.gz")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of an idx file of bytes."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MAX_BYTES)
    except (OSError, EOFError) as error:
        raise JobError(f"{path} cannot be read: {error}") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise JobError(f"{path} is not an idx file of bytes: it starts with {content[:4]!r}")
    dims = content[3]
    shape = tuple(int(n) for n in np.frombuffer(content, ">i4", dims, 4)) if len(content) >= 4 + 4 * dims else ()
    body = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape))
    if not shape or min(shape) < 0 or body.size != int(np.prod(shape)):
        raise JobError(f"{path} is damaged: it has {body.size} values for the shape {list(shape)}")
    return body.reshape(shape)
