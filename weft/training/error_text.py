"""Where an error of a rank was raised: the line of the user's code, if it was called."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
WEFT = f"{os.sep}weft{os.sep}"


def where_raised(error: BaseException) -> str:
    """File, line and function of the user's code that Weft called last; without any, those of Weft."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _of_library(f.filename)]
    first = next((i for i, f in enumerate(frames) if WEFT in f.filename), 0)  # a script may have called weft.train()
    user = [f for f in frames[first:] if WEFT not in f.filename]
    frame = (user or frames)[-1] if frames else None
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" if frame else ""


def _of_library(file: str) -> bool:
    """Whether a source file is neither Weft's nor the user's own."""
    return WEFT not in file and (file.startswith(("<", *LIBRARIES)) or f"{os.sep}dist-packages" in file)
