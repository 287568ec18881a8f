"""Images and their classes from files: idx, a folder tree, tar shards, parquet."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.vision.idx_files import FILES, find_idx, read_idx
from weft.job.errors import JobError, MachineError

Image = NDArray[np.uint8]
"""[height, width, colours]"""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
TRAIN_NAMES, VAL_NAMES = {"train", "training"}, {"val", "valid", "validation", "test"}


@dataclass(frozen=True)
class ImageFiles:
    """Images by number. Reading one twice gives the same array."""

    count: int
    read: Callable[[int], tuple[Image, int]]
    """The image of a number and its class."""
    classes: int
    names: tuple[str, ...] = ()
    """Names of the classes, where folders give them."""


def decode(content: bytes, where: str) -> Image:
    """The pixels of an encoded image."""
    try:
        from PIL import Image as Pillow
    except ImportError:
        raise MachineError("images are decoded by Pillow, which is not installed; pip install 'weft[vision]'") from None
    try:
        with Pillow.open(io.BytesIO(content)) as image:
            if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to 255
                pixels = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
            else:
                grey = image.mode in ("1", "L", "LA")
                pixels = np.asarray(image.convert("L" if grey else "RGB"), dtype=np.uint8)
    except MemoryError:
        raise
    except Exception as error:  # damaged files raise ValueError, SyntaxError and others
        raise JobError(f"{where} is not an image that Pillow can read: {error}") from None
    return pixels[..., None] if pixels.ndim == 2 else pixels


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
    train, val = (_inside(root, names) for names in (TRAIN_NAMES, VAL_NAMES))
    classes = sorted(p.name for p in (train or root).iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        raise JobError(f"data.source {root} has no folder for a class; images are in FOLDER/CLASS/NAME.jpg")
    made = [_class_folders(part, classes) for part in (train or root, val) if part is not None]
    return made[0], made[1] if len(made) > 1 else None


def _inside(root: Path, names: set[str]) -> Path | None:
    return next((root / name for name in sorted(names) if (root / name).is_dir()), None)


def _class_folders(root: Path, classes: list[str]) -> ImageFiles:
    files: list[tuple[Path, int]] = []
    for number, name in enumerate(classes):
        found = sorted(p for p in (root / name).rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        files += [(path, number) for path in found]
    if not files:
        raise JobError(f"data.source {root} has no images ({', '.join(SUFFIXES[:3])}, …) in its folders of classes")
    return ImageFiles(
        len(files), lambda i: (decode(files[i][0].read_bytes(), str(files[i][0])), files[i][1]), len(classes),
        tuple(classes),
    )  # fmt: skip


def open_tar(paths: Sequence[Path]) -> ImageFiles:
    """Shards of WebDataset: members NAME.jpg and NAME.cls (a number) in files that are not compressed."""

    def label(content: bytes | None, where: str) -> int:
        if content is None:
            raise JobError(f"{where} has no class in a file of the same name with the ending .cls")
        try:
            return int(content)
        except ValueError:
            raise JobError(f"{where} has the class {content[:64]!r}, which is no number") from None

    return read_shards(paths, ("cls", "label"), label)


def read_shards(
    paths: Sequence[Path], endings: tuple[str, ...], number_of: Callable[[bytes | None, str], int]
) -> ImageFiles:
    """The images of tar shards, with the numbers that `number_of` makes of the members beside them with one of the
    endings; None where there is none."""
    rows: list[tuple[Path, int, int, int, str]] = []  # file, offset and size of an image, number, name
    for path in paths:
        images: dict[str, tarfile.TarInfo] = {}
        beside: dict[str, bytes] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    stem, _, suffix = name.partition(".")
                    if f".{suffix.lower()}" in SUFFIXES:
                        images[f"{folder}/{stem}"] = member
                    elif suffix in endings and (file := archive.extractfile(member)) is not None:
                        beside[f"{folder}/{stem}"] = file.read()
        except (tarfile.TarError, OSError) as error:
            raise JobError(f"{path} is not a shard of images: {error}") from None
        for key, member in images.items():
            number = number_of(beside.get(key), f"{member.name} of {path}")
            rows.append((path, member.offset_data, member.size, number, member.name))
    if not rows:
        raise JobError(f"the shards {', '.join(p.name for p in paths[:3])} have no images")

    def read(i: int) -> tuple[Image, int]:
        path, offset, size, number, name = rows[i]
        with path.open("rb") as file:
            file.seek(offset)
            return decode(file.read(size), f"{name} of {path}"), number

    return ImageFiles(len(rows), read, max(row[3] for row in rows) + 1)


def open_parquet(paths: Sequence[Path]) -> ImageFiles:
    """Columns `image` (encoded bytes, or Hugging Face's struct with `bytes`) and `label`, of parquet or arrow files."""
    return read_columns(paths, COLUMNS, lambda path, column: column.to_numpy())


def _arrow_table(path: Path) -> Any:
    """The table of an arrow file or stream, mapped into memory."""
    import pyarrow as arrow

    file = arrow.memory_map(str(path))
    try:
        return arrow.ipc.open_stream(file).read_all()
    except arrow.ArrowInvalid:
        return arrow.ipc.open_file(file).read_all()


def read_columns(
    paths: Sequence[Path], columns: tuple[Sequence[str], ...], numbers_of: Callable[[Path, Any], Any]
) -> ImageFiles:
    """The images of parquet files, with the numbers that `numbers_of` makes of their second column."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MachineError("parquet is read by pyarrow, which is not installed; pip install 'weft[vision]'") from None
    tables = []
    for path in paths:
        try:
            table = _arrow_table(path) if path.suffix == ".arrow" else parquet.read_table(path, memory_map=True)
        except (OSError, ValueError) as error:
            raise JobError(f"{path} is not parquet: {error}") from None
        image, label = (next((c for c in names if c in table.column_names), None) for names in columns)
        if image is None or label is None:
            raise JobError(f"{path} has the columns {', '.join(table.column_names)}; it needs image and "
                           f"{columns[1][0]}")  # fmt: skip
        numbers = np.asarray(numbers_of(path, table.column(label)), dtype=np.int64)
        tables.append((path, table.column(image), numbers))
    ends = np.cumsum([len(labels) for _, _, labels in tables])
    if not len(ends) or not ends[-1]:
        raise JobError(f"the files {', '.join(p.name for p in paths[:3])} have no rows")

    def read(i: int) -> tuple[Image, int]:
        number = int(np.searchsorted(ends, i, side="right"))
        path, images, labels = tables[number]
        row = i - (int(ends[number - 1]) if number else 0)
        value: Any = images[row].as_py()
        content = value["bytes"] if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise JobError(f"row {row} of {path} has no bytes of an image; save the dataset with its images embedded")
        return decode(content, f"row {row} of {path}"), int(labels[row])

    return ImageFiles(int(ends[-1]), read, max(int(labels.max()) for _, _, labels in tables) + 1)


COLUMNS = (("image", "img", "png", "jpg"), ("label", "labels", "cls", "fine_label"))


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
    opening, ends = (open_tar, (".tar",)) if kind == "tar" else (open_parquet, (".parquet",))
    paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in ends)
    if not paths:
        raise JobError(f"data.source {root} has no {ends[0]} file")
    held_out = [p for p in paths if root.is_dir() and VAL_NAMES & path_words(p.relative_to(root))]
    training = [p for p in paths if p not in held_out]
    if not training or not held_out:
        return opening(paths), None
    return opening(training), opening(held_out)


def path_words(path: Path) -> set[str]:
    """The words in a path, such as val and 000 of val-000.tar."""
    return set(re.split(r"[^a-z0-9]+", str(path).lower()))


def detect(root: Path) -> str:
    """The format of a path."""
    if root.is_dir() and find_idx(root) is not None:
        return "idx"
    names = [root.name] if root.is_file() else [p.name for p in root.rglob("*") if p.suffix in (".tar", ".parquet")]
    for suffix, kind in ((".tar", "tar"), (".parquet", "parquet")):
        if any(name.endswith(suffix) for name in names):
            return kind
    return "folder"
