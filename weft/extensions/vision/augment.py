"""Augmentation of images. Every random number is drawn from a generator of (seed, image, epoch)."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.extensions.vision.image_operations import autoaugmented, randaugmented
from weft.job.data import ImageData

Pixels = NDArray[Any]
"""[height, width, colours], bytes or floats between 0 and 1"""

CROP_TRIES, RATIO = 10, (3 / 4, 4 / 3)
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 3.3)


def random_of(seed: int, index: int, epoch: int) -> np.random.Generator:
    """The generator of an image in an epoch: the same on every machine and in every layout."""
    digest = hashlib.blake2b(f"weft image {seed} {epoch}".encode(), digest_size=8).digest()
    key = np.array([int.from_bytes(digest, "little"), index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def augmented(image: Pixels, options: ImageData, random: np.random.Generator) -> NDArray[np.float32]:
    """One image of bytes, augmented, as floats between 0 and 1; not yet mixed or normalised."""
    if options.crop:
        box = crop_box(image.shape[0], image.shape[1], options.crop, random)
        image = resized(cut(image, box), options.size or image.shape[0], options.size or image.shape[1])
    elif options.size:
        image = fitted(image, options.size)
    if options.flip and random.random() < options.flip:
        image = image[:, ::-1]
    if options.autoaugment:
        image = autoaugmented(image, random)
    if options.randaugment:
        image = randaugmented(image, options.randaugment, options.magnitude, random)
    if options.shift:
        dy, dx = (int(n) for n in random.integers(-options.shift, options.shift + 1, size=2))
        image = shifted(image, dy, dx)
    return _floats(image)


def plain(image: Pixels, options: ImageData) -> NDArray[np.float32]:
    """One image for evaluation: scaled and cropped at its centre."""
    return _floats(fitted(image, options.size) if options.size else image)


def _floats(image: Pixels) -> NDArray[np.float32]:
    return image.astype(np.float32) / np.float32(255) if image.dtype == np.uint8 else image.astype(np.float32)


def crop_box(height: int, width: int, least: float, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random resized crop, as torchvision draws it."""
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(CROP_TRIES):
        area = height * width * random.uniform(least, 1.0)
        ratio = math.exp(random.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1)), h, w
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def cut(image: Pixels, box: tuple[int, int, int, int]) -> Pixels:
    top, left, height, width = box
    return image[top : top + height, left : left + width]


def resized(image: Pixels, height: int, width: int) -> Pixels:
    """Bilinear with antialiasing, as torchvision resizes tensors: bytes without a detour over floats."""
    if image.shape[:2] == (height, width):
        return image
    import torch
    import torch.nn.functional as F

    values = torch.from_numpy(np.array(image, order="C")).permute(2, 0, 1)[None]
    out = F.interpolate(values, size=(height, width), mode="bilinear", antialias=True, align_corners=False)[0]
    made: Pixels = out.permute(1, 2, 0).numpy()
    return made


def fitted(image: Pixels, size: int) -> Pixels:
    """Scaled so that the shorter side is `size`, and cropped at the centre, with torchvision's rounding of both."""
    height, width = image.shape[:2]
    short = min(height, width)
    height, width = size * height // short, size * width // short
    return cut(resized(image, height, width), (round((height - size) / 2), round((width - size) / 2), size, size))


def shifted(image: Pixels, down: int, right: int) -> Pixels:
    """Moved by some pixels, black where nothing came from."""
    out = np.zeros_like(image)
    height, width = image.shape[:2]
    source = image[max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
    out[max(0, down) : max(0, down) + source.shape[0], max(0, right) : max(0, right) + source.shape[1]] = source
    return out


def erased(image: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:
    """A random rectangle set to 0 (Zhong et al., 2017), in normalised values."""
    height, width = image.shape[:2]
    low, high = math.log(ERASED_RATIO[0]), math.log(ERASED_RATIO[1])
    for _ in range(CROP_TRIES):
        area = height * width * random.uniform(*ERASED_AREA)
        ratio = math.exp(random.uniform(low, high))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            top, left = int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1))
            image = image.copy()
            image[top : top + h, left : left + w] = 0
            return image
    return image


def mixed(
    image: NDArray[np.float32], other: NDArray[np.float32], options: ImageData, random: np.random.Generator
) -> tuple[NDArray[np.float32], float]:
    """Mixup (Zhang et al., 2017) or CutMix (Yun et al., 2019) of two images, and the share of the first."""
    use_cutmix = options.cutmix > 0 and (not options.mixup or random.random() < 0.5)
    alpha = options.cutmix if use_cutmix else options.mixup
    share = float(random.beta(alpha, alpha))
    if not use_cutmix:
        return np.float32(share) * image + np.float32(1 - share) * other, share
    height, width = image.shape[:2]
    side = math.sqrt(1 - share)
    y, x = int(random.integers(height)), int(random.integers(width))
    top, bottom = max(0, y - int(height * side) // 2), min(height, y + int(height * side) // 2)
    left, right = max(0, x - int(width * side) // 2), min(width, x + int(width * side) // 2)
    image = image.copy()
    image[top:bottom, left:right] = other[top:bottom, left:right]
    return image, 1 - (bottom - top) * (right - left) / (height * width)
