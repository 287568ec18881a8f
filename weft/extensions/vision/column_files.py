"""Images in a column of parquet or arrow files, with a label or a caption in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.extensions.vision.decoded_images import Image, ImageFiles, decode
from weft.job.errors import JobError, MachineError

IMAGE_COLUMNS = ("image", "img", "png", "jpg")
LABEL_COLUMNS = ("label", "labels", "cls", "fine_label")
"""Names of columns; the first that a file has is read."""


class ImageColumns(NamedTuple):
    """The columns of a file: images, and what belongs to each."""

    path: Path
    images: Any
    values: Any


def open_columns(training: Sequence[Path], held_out: Sequence[Path] = ()) -> tuple[ImageFiles, ImageFiles | None]:
    """The images of training and held-out files, with their classes. Labels are numbers from 0, or texts, which are
    numbered by name."""
    parts = [read_columns(part, LABEL_COLUMNS) for part in (training, held_out) if part]
    labels = [[columns.values.to_pylist() for columns in part] for part in parts]
    texts = sorted({label for part in labels for file in part for label in file if isinstance(label, str)})
    numbers = {text: number for number, text in enumerate(texts)}
    made = [
        column_images(part, [_classes(columns.path, file, numbers) for columns, file in zip(part, files, strict=True)])
        for part, files in zip(parts, labels, strict=True)
    ]
    return made[0], made[1] if len(made) > 1 else None


def _classes(path: Path, labels: list[Any], numbers: dict[str, int]) -> NDArray[np.int64]:
    """The number of each label: of a text, or of itself where no label is a text."""
    kind = str if numbers else int
    for row, label in enumerate(labels):
        if not isinstance(label, kind) or (isinstance(label, int) and label < 0):
            raise JobError(f"row {row} of {path} has the label {label!r}; labels are numbers from 0, or texts")
    return np.asarray([numbers[label] for label in labels] if numbers else labels, dtype=np.int64)


def _arrow_table(path: Path) -> Any:
    """The table of an arrow file or stream, mapped into memory."""
    import pyarrow as arrow

    file = arrow.memory_map(str(path))
    try:
        return arrow.ipc.open_stream(file).read_all()
    except arrow.ArrowInvalid:
        return arrow.ipc.open_file(file).read_all()


def read_columns(paths: Sequence[Path], names: Sequence[str]) -> list[ImageColumns]:
    """The images of parquet or arrow files (encoded bytes, or Hugging Face's struct with `bytes`), and the first
    column of these names."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MachineError("parquet is read by pyarrow, which is not installed; pip install 'weft[vision]'") from None
    made = []
    for path in paths:
        try:
            table = _arrow_table(path) if path.suffix == ".arrow" else parquet.read_table(path, memory_map=True)
        except (OSError, ValueError) as error:
            raise JobError(f"{path} is not parquet: {error}") from None
        image, value = (next((c for c in any_of if c in table.column_names), None) for any_of in (IMAGE_COLUMNS, names))
        if image is None or value is None:
            raise JobError(f"{path} has the columns {', '.join(table.column_names)}; it needs image and {names[0]}")
        made.append(ImageColumns(path, table.column(image), table.column(value)))
    return made


def column_images(columns: Sequence[ImageColumns], numbers: Sequence[NDArray[np.int64]]) -> ImageFiles:
    """The images of files by number, with the number that belongs to each."""
    ends = np.cumsum([len(part) for part in numbers])
    if not len(ends) or not ends[-1]:
        raise JobError(f"the files {', '.join(c.path.name for c in columns[:3])} have no rows")

    def read(i: int) -> tuple[Image, int]:
        part = int(np.searchsorted(ends, i, side="right"))
        row = i - (int(ends[part - 1]) if part else 0)
        value: Any = columns[part].images[row].as_py()
        content, where = value["bytes"] if isinstance(value, dict) else value, f"row {row} of {columns[part].path}"
        if not isinstance(content, bytes):
            raise JobError(f"{where} has no bytes of an image; save the dataset with its images embedded")
        return decode(content, where), int(numbers[part][row])

    return ImageFiles(int(ends[-1]), read, max(int(part.max()) for part in numbers if len(part)) + 1)
