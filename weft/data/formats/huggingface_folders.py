"""Folders of `datasets.save_to_disk`: their arrow files in order, of the split `train` where there are several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.job.errors import JobError

SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
MAX_STATE_BYTES = 1 << 24


def dataset_files(folder: Path) -> list[Path]:
    """The files of a saved dataset; empty where the folder is none."""
    if (folder / SPLITS_FILE).is_file():
        splits = _read(folder / SPLITS_FILE).get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        if "train" not in names:
            raise JobError(
                f"{folder} has the splits {', '.join(names) or 'none'} and no train; name the folder of one, such as "
                f"{folder / (names[0] if names else 'train')}"
            )
        folder = folder / "train"
    if not (folder / STATE_FILE).is_file():
        return []
    listed = _read(folder / STATE_FILE).get("_data_files")
    if not isinstance(listed, list):
        return []
    names = [str(each.get("filename")) if isinstance(each, dict) else "" for each in listed]
    for name in names:
        if not name or Path(name).name != name or not (folder / name).is_file():
            raise JobError(f"{folder / STATE_FILE} lists {name!r}, which is no file of its folder")
    return [folder / name for name in names]


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise ValueError("it is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
