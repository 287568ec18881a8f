"""What compression changes in an estimate: bytes that travel, bytes that encoding moves, bytes that are owed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.calibration import Calibration
from weft.plan.facts import ModelFacts, Size
from weft.plan.layouts import COMPRESSIONS, Layouts


@dataclass(frozen=True)
class Travel:
    """Bytes for one number. Numbers in the setting (topk:0.01) are taken for their defaults."""

    gradient: float
    weight: float
    """A gathered weight; never more than without compression."""
    encoding: float
    """Moved through memory to encode and decode a gradient."""
    owed: float = 0.0
    """Kept between steps, whole over the data-parallel ranks."""


TRAVEL: dict[str, Travel] = {
    "none": Travel(0.0, 4.0, 0.0),  # what the stack reduces in
    "fp16": Travel(2.01, 2.01, 28.0),
    "bf16": Travel(2.0, 2.0, 20.0),
    "int8": Travel(1.016, 1.03, 28.0),
    "int4": Travel(0.53, 1.03, 40.0, owed=4.0),
    "topk": Travel(0.06, 1.03, 32.0, owed=4.0),
    "threshold": Travel(0.02, 1.03, 40.0, owed=4.0),
    "powersgd": Travel(0.0, 1.03, 24.0, owed=4.0),  # by the width of the model
    "onebit": Travel(0.13, 1.03, 32.0, owed=4.0),
    "adaptive": Travel(1.016, 1.03, 28.0, owed=4.0),  # as int8, between its rungs
}
LOW_RANK = 4


def _chosen(layouts: Layouts, values: list[Size]) -> Size:
    return np.choose(layouts.compression, [np.asarray(v) + 0.0 * layouts.tp for v in values])


def gradient_bytes(layouts: Layouts, model: ModelFacts, cal: Calibration) -> Size:
    """What a gradient's number travels as."""
    told: dict[str, Size] = {name: travel.gradient for name, travel in TRAVEL.items()}
    told |= {"none": cal.reduce_bytes, "powersgd": 8.0 * LOW_RANK / np.asarray(model.dim)}
    return _chosen(layouts, [told[name] for name in COMPRESSIONS])


def weight_bytes(layouts: Layouts, size: Size) -> Size:
    """What a gathered weight travels as, of `size` bytes where it computes."""
    return np.minimum(size, _chosen(layouts, [TRAVEL[name].weight for name in COMPRESSIONS]))


def encoding_bytes(layouts: Layouts) -> Size:
    """Moved through memory for each gradient that is encoded."""
    return _chosen(layouts, [TRAVEL[name].encoding for name in COMPRESSIONS])


def owed_bytes(layouts: Layouts) -> Size:
    """Kept for each gradient between steps, where more than one rank sums."""
    owed = _chosen(layouts, [TRAVEL[name].owed for name in COMPRESSIONS])
    return np.where(layouts.dp * layouts.cp > 1, owed, 0.0)
