"""Datasets with `__len__` and `__getitem__`, such as torch's, as datasets of Weft."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

HELD_OUT = ("val", "validation", "valid", "eval", "test")
"""Names of the held-out part in a mapping of parts, the best one first."""


class MapStyle:
    """A training part and a held-out part, which may be missing."""

    def __init__(self, train: Any, val: Any = None) -> None:
        self._train, self._val, self.name = train, val, type(train).__name__
        self.train_len = len(train)
        self.val_len = 0 if val is None else len(val)

    def train(self, index: int) -> Any:
        return self._train[index]

    def val(self, index: int) -> Any:
        return self._val[index]


def as_dataset(made: Any) -> Any:
    """`made`, or the MapStyle of one such dataset, of two in a tuple or, as random_split returns them, in a list, or of
    a mapping with train."""
    if hasattr(made, "train_len"):
        return made
    if isinstance(made, Mapping):
        held_out = next((made[name] for name in HELD_OUT if name in made), None)
        parts = [made.get("train"), *([] if held_out is None else [held_out])]
    elif isinstance(made, (tuple, list)) and len(made) == 2 and (type(made) is tuple or type(made[0]) is not list):
        parts = list(made) if all(map(_is_map_style, made)) else [made]
    else:
        parts = [made]
    return MapStyle(*parts) if all(map(_is_map_style, parts)) else made


def _is_map_style(part: Any) -> bool:
    """Whether it has a length and items that may be samples; an array is one sample."""
    other = isinstance(part, (str, bytes, tuple, Mapping)) or hasattr(part, "__array__")
    return isinstance(part, Sized) and hasattr(part, "__getitem__") and not other
