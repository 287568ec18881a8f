"""Arguments of the image-text model from a job; without torch, since plans need them."""

from __future__ import annotations

from typing import Any

from weft.job.errors import JobError
from weft.job.schema import Data, Model
from weft.job.shapes import data_vocab

IMAGE_SIDE = 224
"""Pixels on a side of images without data.images.size."""


def image_side(data: Data) -> int:
    """Pixels on a side of the images."""
    return (data.images.size if data.images else None) or IMAGE_SIDE


def clip_args(model: Model, data: Data) -> dict[str, Any]:
    """The constructor's arguments of ImageText from a job's model section."""
    missing = [name for name in ("image", "text") if name not in model.towers]
    if missing:
        raise JobError(f"model.towers has no tower {missing[0]}, and clip needs image and text; add {missing[0]}: "
                       "{dim: 512, layers: 12, heads: 8}")  # fmt: skip
    side = model.image[0] if model.image else image_side(data)
    if model.image and data.images and data.images.size not in (None, side):
        raise JobError(
            f"data.images.size={data.images.size} differs from model.image={side}x{side}; leave data.images.size out"
        )
    for name, tower in model.towers.items():
        if tower.dim % tower.heads:
            raise JobError(
                f"model.towers.{name}.dim={tower.dim} is not a multiple of its heads={tower.heads}; "
                f"heads={max(h for h in range(1, tower.heads + 1) if tower.dim % h == 0)} would work"
            )
    patch = model.towers["image"].patch
    if side < patch or (side % patch and not model.image):
        raise JobError(
            f"data.images.size={side} is not a multiple of model.towers.image.patch={patch}; "
            f"size={max(side // patch, 1) * patch} would work"
        )
    shapes = {
        name: {"dim": t.dim, "layers": t.layers, "heads": t.heads, "ffn": t.width} for name, t in model.towers.items()
    }
    channels = model.channels or (data.images.channels if data.images else None) or 3
    return {
        "image": shapes["image"], "text": shapes["text"], "dim": model.dim, "side": side, "patch": patch,
        "channels": channels, "vocab": model.vocab or data_vocab(data) or 256, "context": model.max_len or data.seq_len,
        "activation": model.activation, "eps": model.norm_eps or 1e-5, "end": model.towers["text"].end,
    }  # fmt: skip
