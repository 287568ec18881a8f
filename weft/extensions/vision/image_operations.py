"""The operations of AutoAugment and RandAugment, by Pillow, and how both draw them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.job.data import ImageData
from weft.job.errors import MachineError

if TYPE_CHECKING:
    from PIL.Image import Image

RANDAUGMENT_BINS, AUTOAUGMENT_BINS = 30, 9
"""Highest magnitudes of both."""

RANDAUGMENT = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip

IMAGENET_POLICY: tuple[tuple[tuple[str, float, int], tuple[str, float, int]], ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)), (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)), (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)), (("equalize", 0.4, 0), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 0)), (("posterize", 0.8, 5), ("equalize", 1.0, 0)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)), (("equalize", 0.6, 0), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)), (("rotate", 0.4, 9), ("equalize", 0.6, 0)),
    (("equalize", 0.0, 0), ("equalize", 0.8, 0)), (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)), (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)), (("sharpness", 0.4, 7), ("invert", 0.6, 0)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 0)), (("color", 0.4, 0), ("equalize", 0.6, 0)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)), (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)), (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
)  # fmt: skip
"""AutoAugment's policy for ImageNet (Cubuk et al., 2018): pairs of operations with their probability and magnitude."""


def check_operations(options: ImageData) -> None:
    """Refuse RandAugment and AutoAugment where Pillow is missing."""
    if (options.randaugment or options.autoaugment) and importlib.util.find_spec("PIL") is None:
        name = "autoaugment" if options.autoaugment else "randaugment"
        raise MachineError(f"data.images.{name} needs Pillow, which is not installed; pip install 'weft[vision]'")


def randaugmented(pixels: NDArray[Any], count: int, magnitude: int, random: np.random.Generator) -> NDArray[Any]:
    """`count` random operations of RandAugment (Cubuk et al., 2019) on bytes [height, width, colours]."""
    chosen = [(RANDAUGMENT[int(random.integers(len(RANDAUGMENT)))], _sign(random)) for _ in range(count)]
    return apply_operations(pixels, [(name, sign * magnitude / RANDAUGMENT_BINS) for name, sign in chosen])


def autoaugmented(pixels: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    """One pair of operations of AutoAugment's policy for ImageNet."""
    pair = IMAGENET_POLICY[int(random.integers(len(IMAGENET_POLICY)))]
    drawn = [(name, _sign(random) * level / AUTOAUGMENT_BINS, random.random() < chance) for name, chance, level in pair]
    return apply_operations(pixels, [(name, share) for name, share, used in drawn if used])


def _sign(random: np.random.Generator) -> float:
    return 1.0 if random.random() < 0.5 else -1.0


def apply_operations(pixels: NDArray[Any], operations: list[tuple[str, float]]) -> NDArray[Any]:
    """The image after these operations, each with a share of its largest strength between -1 and 1; operations without
    a direction use its size."""
    from PIL import Image as Pillow

    grey = pixels.shape[-1] == 1
    image = Pillow.fromarray(np.ascontiguousarray(pixels[..., 0] if grey else pixels))
    for name, share in operations:
        image = OPERATIONS[name](image, share)
    made = np.asarray(image, dtype=np.uint8)
    return made[..., None] if grey else made


def _affine(image: Image, *matrix: float) -> Image:
    from PIL import Image as Pillow

    return image.transform(image.size, Pillow.Transform.AFFINE, matrix)


def _enhance(kind: str) -> Callable[[Image, float], Image]:
    def enhanced(image: Image, share: float) -> Image:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, kind)(image).enhance(1 + 0.9 * share)

    return enhanced


def _whole(kind: str, *given: Callable[[float], float]) -> Callable[[Image, float], Image]:
    """An operation of ImageOps, with what it takes for a strength."""

    def applied(image: Image, share: float) -> Image:
        from PIL import ImageOps

        return getattr(ImageOps, kind)(image, *(value(abs(share)) for value in given))

    return applied


OPERATIONS: dict[str, Callable[[Image, float], Image]] = {
    "identity": lambda image, share: image,
    "shear_x": lambda image, share: _affine(image, 1, 0.3 * share, 0, 0, 1, 0),
    "shear_y": lambda image, share: _affine(image, 1, 0, 0, 0.3 * share, 1, 0),
    "translate_x": lambda image, share: _affine(image, 1, 0, int(150 / 331 * image.width * share), 0, 1, 0),
    "translate_y": lambda image, share: _affine(image, 1, 0, 0, 0, 1, int(150 / 331 * image.height * share)),
    "rotate": lambda image, share: image.rotate(30 * share),
    "brightness": _enhance("Brightness"),
    "color": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "sharpness": _enhance("Sharpness"),
    "posterize": _whole("posterize", lambda share: 8 - round(4 * share)),
    "solarize": _whole("solarize", lambda share: 255 - 255 * share),
    "autocontrast": _whole("autocontrast"),
    "equalize": _whole("equalize"),
    "invert": _whole("invert"),
}
"""By name: what a share of the largest strength does to an image."""
