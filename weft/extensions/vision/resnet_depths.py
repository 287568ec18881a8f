"""The depths of ResNets, and their arguments from a job; without torch, since plans need them."""

from __future__ import annotations

from typing import Any

from weft.job.data_files.image_folders import count_classes
from weft.job.errors import JobError
from weft.job.schema import Data, Model

DEPTHS: dict[int, tuple[tuple[int, ...], bool]] = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
"""Blocks of each stage by the number of layers, and whether they are bottlenecks."""


def resnet_args(model: Model, data: Data) -> dict[str, Any]:
    """The constructor's arguments from a job's model section."""
    if model.layers not in DEPTHS:
        raise JobError(f"model.layers={model.layers} is no ResNet; layers={', '.join(map(str, DEPTHS))} would work")
    return {
        "layers": model.layers,
        "classes": model.vocab or count_classes(data) or 1000,
        "channels": model.channels or 3,
    }
