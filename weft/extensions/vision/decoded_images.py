"""Numbered images, and the pixels of an encoded one."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.job.errors import JobError, MachineError

Image = NDArray[np.uint8]
"""[height, width, colours]"""


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
        said = re.sub(r" <_io\.BytesIO object at \w+>", "", str(error))
        raise JobError(f"{where} is not an image that Pillow can read: {said}") from None
    return pixels[..., None] if pixels.ndim == 2 else pixels
