"""Images of Hugging Face datasets: of a name in the local caches (`hf:ORG/NAME`), or of a folder of save_to_disk."""

from __future__ import annotations

from pathlib import Path

from weft.data.formats.huggingface_datasets import HUB_PREFIX, SPLITS_FILE, STATE_FILE, dataset_files, hub_dataset_files
from weft.extensions.vision.column_files import open_columns
from weft.extensions.vision.decoded_images import ImageFiles
from weft.job.errors import JobError

HELD_OUT = ("validation", "valid", "val", "test")
"""Splits that are held out: the first that a dataset has."""


def is_hub_dataset(source: str) -> bool:
    folder = Path(source)
    return source.startswith(HUB_PREFIX) or any((folder / name).is_file() for name in (SPLITS_FILE, STATE_FILE))


def open_hub_images(source: str) -> tuple[ImageFiles, ImageFiles | None]:
    """The images of the split train (or of the one that is named) and of the one that is held out, if there is one."""
    if source.startswith(HUB_PREFIX):
        splits = () if ":" in source.removeprefix(HUB_PREFIX) else HELD_OUT
        held_out = [files for split in splits if (files := _split(f"{source}:{split}"))]
        training = _readable(source, hub_dataset_files(source))
    else:
        folder = Path(source)
        held_out = [dataset_files(folder / name) for name in HELD_OUT if (folder / name / STATE_FILE).is_file()]
        training = dataset_files(folder)
    if not training:
        raise JobError(f"data.source {source} has no rows")
    return open_columns(training, held_out[0] if held_out else ())


def _split(source: str) -> list[Path]:
    try:
        return _readable(source, hub_dataset_files(source))
    except JobError:  # a dataset need not have it
        return []


def _readable(source: str, files: list[Path]) -> list[Path]:
    if others := [f.name for f in files if f.suffix not in (".parquet", ".arrow")]:
        raise JobError(f"data.source {source} has {others[0]}; images are read from parquet and arrow files")
    return files
