"""Samples that are trees: nested tuples, lists and dicts as flat dicts, whose keys are paths.

`{"image": a, "words": (b, c)}` below `inputs` is `inputs/image`, `inputs/words/#0` and `inputs/words/#1`. So a batch is
one flat dict of tensors, whatever a dataset yields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Leaf = TypeVar("Leaf")

TARGET_NAMES = ("targets", "target", "labels", "label", "y")
"""Keys of a sample that are its target, the first that it has; a module that names one of them is given it."""


def flatten(value: Any, path: str, leaf: Callable[[Any, str], Leaf]) -> dict[str, Leaf]:
    """The leaves of a tree by path; `leaf` converts each."""
    if isinstance(value, Mapping):
        parts = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, tuple | list) and not _is_array(value):
        parts = [(f"#{i}", child) for i, child in enumerate(value)]
    else:
        return {path: leaf(value, path)}
    return {k: v for key, child in parts for k, v in flatten(child, f"{path}/{key}", leaf).items()}


def _is_array(value: tuple[Any, ...] | list[Any]) -> bool:
    """Whether this is a list of numbers, or of such lists: an array, as NumPy reads it."""
    return isinstance(value, list) and all(
        isinstance(item, int | float) or (isinstance(item, list) and _is_array(item)) for item in value
    )


def unflatten(flat: Mapping[str, Leaf], path: str) -> Any:
    """The tree below a path: a leaf, a tuple or a dict. None where there is nothing."""
    if path in flat:
        return flat[path]
    names = list(dict.fromkeys(key[len(path) + 1 :].partition("/")[0] for key in flat if key.startswith(f"{path}/")))
    if not names:
        return None
    children = {name: unflatten(flat, f"{path}/{name}") for name in names}
    return tuple(children.values()) if names[0].startswith("#") else children
