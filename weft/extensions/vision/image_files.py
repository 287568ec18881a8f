"""Images and their classes from files: idx, a folder tree, tar shards, parquet."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.data.shard_patterns import expand, folder_of
from weft.extensions.vision.column_files import open_columns
from weft.extensions.vision.decoded_images import Image, ImageFiles, decode
from weft.extensions.vision.idx_files import FILES, find_idx, read_idx
from weft.job.data_files.image_folders import IMAGE_SUFFIXES, VAL_NAMES, class_names, training_folder
from weft.job.errors import JobError
from weft.job.registry import listed


def open_idx(files: dict[str, Path]) -> tuple[ImageFiles, ImageFiles]:
    """The training and test images of an idx folder."""
    made = []
    for images, labels in (FILES[:2], FILES[2:]):
        pixels, classes = read_idx(files[images]), read_idx(files[labels])
        if pixels.ndim != 3 or classes.ndim != 1 or len(pixels) != len(classes) or not len(pixels):
            raise JobError(f"{files[images]} has {list(pixels.shape)} pixels for {list(classes.shape)} labels")
        made.append(_arrays(pixels[..., None], classes.astype(np.int64)))
    return made[0], made[1]


def _arrays(pixels: NDArray[np.uint8], classes: NDArray[np.int64]) -> ImageFiles:
    return ImageFiles(len(pixels), lambda i: (pixels[i], int(classes[i])), int(classes.max()) + 1)


def open_folder(root: Path) -> tuple[ImageFiles, ImageFiles | None]:
    """A folder for each class, or train/ and val/ with such folders; classes are numbered by name."""
    train = training_folder(root)
    val = next((root / n for n in sorted(VAL_NAMES) if train != root and (root / n).is_dir()), None)
    classes = class_names(train)
    if not classes:
        raise JobError(f"data.source {root} has no folder for a class; images are in FOLDER/CLASS/NAME.jpg, in shards "
                       ".tar that are not compressed, or in .parquet files")  # fmt: skip
    made = [_class_folders(part, classes) for part in (train, val) if part is not None]
    return made[0], made[1] if len(made) > 1 else None


def visible_files(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files below a folder with one of these endings, by path; without hidden ones, such as ._1.jpg of macOS."""
    found = (p for p in root.rglob("*") if p.suffix.lower() in suffixes and p.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(root).parts))


def _class_folders(root: Path, classes: list[str]) -> ImageFiles:
    files: list[tuple[Path, int]] = []
    for number, name in enumerate(classes):
        files += [(path, number) for path in visible_files(root / name, IMAGE_SUFFIXES)]
    if not files:
        raise JobError(
            f"data.source {root} has no images ({', '.join(IMAGE_SUFFIXES[:3])}, …) in its folders of classes"
        )
    return ImageFiles(
        len(files), lambda i: (decode(files[i][0].read_bytes(), str(files[i][0])), files[i][1]), len(classes),
        tuple(classes),
    )  # fmt: skip


def source_files(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a source: itself, those of a pattern such as shard-{000..007}.tar, or those below a folder."""
    return visible_files(root, suffixes) if root.is_dir() else expand(root)


def held_out_of(root: Path, paths: Sequence[Path]) -> list[Path]:
    """Files of a folder or a pattern with val or test in their names."""
    folder = folder_of(root)
    return [] if root.is_file() else [p for p in paths if VAL_NAMES & path_words(p.relative_to(folder))]


LABEL_FIELDS = ("cls", "label", "class")
"""Fields of NAME.json with a class, by the first that it has."""


def open_tar(training: Sequence[Path], held_out: Sequence[Path] = ()) -> tuple[ImageFiles, ImageFiles | None]:
    """Shards of WebDataset: members NAME.jpg and NAME.cls, or NAME.json with a class, in files that are not compressed.
    Classes are numbers from 0, or texts, which are numbered by name."""
    found: dict[str, tuple[int, str]] = {}  # text of a class: its place here, and the first image that has it

    def place(content: str | None, where: str) -> int:
        if not content:
            raise JobError(
                f"{where} has no class in a file of the same name: NAME.cls, or NAME.json with {listed(LABEL_FIELDS)}"
            )
        return found.setdefault(content, (len(found), where))[0]

    made = [read_shards(part, ("cls", "label"), LABEL_FIELDS, place) for part in (training, held_out) if part]
    classes = _class_numbers({text: where for text, (_, where) in found.items()})
    made = [_renumbered(files, classes) for files in made]
    return made[0], made[1] if len(made) > 1 else None


def _class_numbers(found: dict[str, str]) -> list[int]:
    """The class of each text, given with an image that has it: the number that it is, or its place among names."""
    numbers = {text for text in found if text.isascii() and text.isdigit() and len(text) < 10}
    for text, where in found.items():
        if text not in numbers and (numbers or _is_number(text)):
            raise JobError(f"{where} has the class {text[:64]!r}; classes are numbers from 0, or all of them texts")
    return [int(text) for text in found] if numbers else [sorted(found).index(text) for text in found]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _renumbered(files: ImageFiles, numbers: Sequence[int]) -> ImageFiles:
    """The images with these numbers instead of 0, 1, …"""

    def read(i: int) -> tuple[Image, int]:
        image, place = files.read(i)
        return image, numbers[place]

    return ImageFiles(files.count, read, max(numbers) + 1)


def read_shards(
    paths: Sequence[Path], endings: tuple[str, ...], fields: tuple[str, ...],
    number_of: Callable[[str | None, str], int],
) -> ImageFiles:  # fmt: skip
    """The images of tar shards, with the numbers that `number_of` makes of the texts beside them: members with one of
    the endings, or the first of the fields that NAME.json has; None where there is none."""
    rows: list[tuple[Path, int, int, int, str]] = []  # file, offset and size of an image, number, name
    for path in paths:
        images: dict[str, tarfile.TarInfo] = {}
        beside: dict[str, str] = {}
        described: dict[str, str] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    stem, _, suffix = name.partition(".")
                    if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                        images[f"{folder}/{stem}"] = member
                    elif suffix in (*endings, "json") and (file := archive.extractfile(member)) is not None:
                        content = file.read().decode("utf-8", "replace").strip()
                        (described if suffix == "json" else beside)[f"{folder}/{stem}"] = content
        except (tarfile.TarError, OSError) as error:
            raise JobError(f"{path} is not a shard of images: {error}") from None
        for key, member in images.items():
            where = f"{member.name} of {path}"
            text = beside[key] if key in beside else _field(described.get(key), fields, where)
            number = number_of(text, where)
            rows.append((path, member.offset_data, member.size, number, member.name))
    if not rows:
        raise JobError(f"the shards {', '.join(p.name for p in paths[:3])} have no images")

    def read(i: int) -> tuple[Image, int]:
        path, offset, size, number, name = rows[i]
        with path.open("rb") as file:
            file.seek(offset)
            return decode(file.read(size), f"{name} of {path}"), number

    return ImageFiles(len(rows), read, max(row[3] for row in rows) + 1)


def _field(content: str | None, fields: tuple[str, ...], where: str) -> str | None:
    """The first of some fields in the text of NAME.json."""
    if content is None:
        return None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise JobError(f"the .json beside {where} is not JSON: {error}") from None
    found = next((record[f] for f in fields if record.get(f) is not None), None) if isinstance(record, dict) else None
    if isinstance(found, bool | list | dict):
        raise JobError(f"the .json beside {where} has {listed(fields)} {str(found)[:64]}; write a number or a text")
    return None if found is None else str(found).strip()


def open_files(root: Path, kind: str) -> tuple[ImageFiles, ImageFiles | None]:
    """The training and held-out images of a path; None where the latter are not marked as such."""
    if kind == "auto":
        kind = detect(root)
    if kind == "idx":
        found = find_idx(root)
        if found is None:
            raise JobError(f"data.source {root} has not the files {', '.join(FILES)} (or .gz)")
        return open_idx(found)
    if kind == "folder":
        return open_folder(root)
    opening, ends = (open_tar, (".tar",)) if kind == "tar" else (open_columns, (".parquet",))
    paths = source_files(root, ends)
    if not paths:
        raise JobError(f"data.source {root} has no {ends[0]} file")
    held_out = held_out_of(root, paths)
    training = [p for p in paths if p not in held_out]
    if not training or not held_out:
        return opening(paths)
    return opening(training, held_out)


def path_words(path: Path) -> set[str]:
    """The words in a path, such as val and 000 of val-000.tar."""
    return set(re.split(r"[^a-z0-9]+", str(path).lower()))


def detect(root: Path) -> str:
    """The format of a path."""
    if root.is_dir() and find_idx(root) is not None:
        return "idx"
    names = [p.name for p in source_files(root, tuple(KINDS))]
    return next((kind for end, kind in KINDS.items() if any(n.lower().endswith(end) for n in names)), "folder")


KINDS = {".tar": "tar", ".parquet": "parquet"}
