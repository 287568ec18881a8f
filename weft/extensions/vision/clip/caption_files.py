"""Images with captions from files: a list of captions beside the images, tar shards, parquet, or folders of classes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.extensions.vision.column_files import column_images, read_columns
from weft.extensions.vision.decoded_images import Image, ImageFiles, decode
from weft.extensions.vision.image_files import held_out_of, open_folder, read_shards, source_files
from weft.job.errors import JobError

LISTS = (".jsonl", ".ndjson", ".csv", ".tsv")
"""Files that list images and their captions."""
PATH_FIELDS = ("image", "file_name", "filepath", "file", "path")
CAPTION_FIELDS = ("caption", "text", "title")
"""Fields of a record with the path of its image and with its caption, by the first that it has."""


@dataclass(frozen=True)
class CaptionFiles:
    """Images by number with the number of their caption, and the captions; images may share one."""

    train: ImageFiles
    val: ImageFiles | None
    captions: tuple[str, ...]


class CaptionNumbers:
    """Numbers of distinct captions, in the order in which they are found."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, caption: Any, where: str) -> int:
        """The number of a caption."""
        if not isinstance(caption, str) or not caption.strip():
            raise JobError(f"{where} has no caption ({caption!r}); write a text beside the image")
        return self.numbers.setdefault(caption.strip(), len(self.numbers))


def open_captions(root: Path, prompt: str) -> CaptionFiles:
    """The images of a path and their captions. `prompt` makes the caption of an image in a folder of a class."""
    paths = source_files(root, (*LISTS, ".tar", ".parquet"))
    found = CaptionNumbers()
    for ends, opening in ((LISTS, _open_lists), ((".tar",), _open_shards), ((".parquet",), _open_parquet)):
        files = [p for p in paths if p.suffix.lower() in ends]
        if files:
            held = held_out_of(root, files)
            training = [p for p in files if p not in held]
            made = [opening(part, found) for part in (training or files, held if training else ()) if part]
            return CaptionFiles(made[0], made[1] if len(made) > 1 else None, tuple(found.numbers))
    train, val = open_folder(root)
    return CaptionFiles(train, val, tuple(prompt.format(name.replace("_", " ")) for name in train.names))


def _open_lists(paths: Sequence[Path], found: CaptionNumbers) -> ImageFiles:
    """Records with the path of an image, from the folder of their file, and its caption."""
    rows: list[tuple[Path, int]] = []
    for path in paths:
        for number, record in _records(path):
            where = f"{path} line {number}"
            image, caption = (next((record[f] for f in fields if record.get(f)), None) for fields in FIELDS)
            if image is None:
                raise JobError(f"{where} has {', '.join(map(str, record))}; it needs image and caption")
            rows.append((path.parent / str(image), found.number(caption, where)))
    if not rows:
        raise JobError(f"{paths[0]} lists no images")
    if not rows[0][0].is_file():
        raise JobError(f"{paths[0]} names {rows[0][0]}, which is no file; paths of images begin at the list's folder")

    def read(i: int) -> tuple[Image, int]:
        path, number = rows[i]
        try:
            return decode(path.read_bytes(), str(path)), number
        except OSError as error:
            raise JobError(f"the image {path} cannot be read: {error}") from None

    return ImageFiles(len(rows), read, len(found.numbers))


FIELDS = (PATH_FIELDS, CAPTION_FIELDS)


def _records(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """The number and the fields of each line of a list."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix.lower() in (".csv", ".tsv"):
                reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
                yield from enumerate(reader, 2)
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise JobError(f"{path} line {number} is not an object with image and caption")
                    yield number, record
    except (ValueError, RecursionError, csv.Error) as error:
        raise JobError(f"{path} is not a list of captions: {error}") from None


def _open_shards(paths: Sequence[Path], found: CaptionNumbers) -> ImageFiles:
    """Shards of WebDataset: members NAME.jpg and NAME.txt, or NAME.json with a caption, in files that are not
    compressed."""
    return read_shards(paths, ("txt",), CAPTION_FIELDS, found.number)


def _open_parquet(paths: Sequence[Path], found: CaptionNumbers) -> ImageFiles:
    """Columns `image` (encoded bytes, or Hugging Face's struct with `bytes`) and `caption`."""

    columns = read_columns(paths, CAPTION_FIELDS)
    numbers = [
        [found.number(text, f"row {i} of {path}") for i, text in enumerate(texts.to_pylist())]
        for path, _, texts in columns
    ]
    return column_images(columns, [np.asarray(part, dtype=np.int64) for part in numbers])
