"""Folders of images, one for each class; without torch, since a plan needs their number."""

from __future__ import annotations

import os
from pathlib import Path

from weft.job.data import Data

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
TRAIN_NAMES, VAL_NAMES = {"train", "training"}, {"val", "valid", "validation", "test"}


def training_folder(root: Path) -> Path:
    """The folder with those of the classes: train/ if it has some, else the root."""
    return next((root / n for n in sorted(TRAIN_NAMES) if class_names(root / n)), root)


def class_names(folder: Path) -> list[str]:
    """Folders of classes. The folder of a split has some; one without is a class itself, such as bus, car and train."""
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def count_classes(data: Data) -> int | None:
    """The classes of data.source, if it is a folder of such folders; the first decides, as there may be many."""
    if data.images is not None and data.images.format not in ("auto", "folder"):
        return None
    try:
        folder = training_folder(Path(data.source))
        names = class_names(folder)
        return len(names) if names and _has_image(folder / names[0]) else None
    except OSError:  # opening the data says what is wrong
        return None


def _has_image(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in entries)
