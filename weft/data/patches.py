"""Images as rows of patches."""

from __future__ import annotations

import numpy as np

from weft.job.schema import Model


def image_patches(image: np.ndarray, model: Model) -> np.ndarray:
    """The patches of an image [channels, height, width], row by row, each flattened: [patches, values]. With a class
    token, the first row is zeros."""
    depth, height, width = image.shape
    patch, channels = model.patch or 4, model.channels or 3
    if depth != channels:
        raise ValueError(f"has {depth} channels where model.channels={channels}; write model.channels={depth}")
    if model.image is not None:
        if (height, width) != model.image:
            raise ValueError(f"has {height} × {width} pixels, and the model takes {model.image[0]} × {model.image[1]}")
        height, width = height // patch * patch, width // patch * patch
        image = image[:, :height, :width]
    if height % patch or width % patch:
        whole = " × ".join(str(max(patch, side // patch * patch)) for side in (height, width))
        raise ValueError(f"has {height} × {width} pixels, which patches of model.patch={patch} do not divide; {whole} "
                         "pixels would work")  # fmt: skip
    rows = image.reshape(depth, height // patch, patch, width // patch, patch).transpose(1, 3, 0, 2, 4)
    patches = np.ascontiguousarray(rows.reshape(-1, depth * patch * patch))
    return with_token_row(patches) if model.class_token else patches


def with_token_row(patches: np.ndarray) -> np.ndarray:
    """Patches with a first row of zeros, where the class token goes."""
    return np.concatenate((np.zeros_like(patches[:1]), patches))
