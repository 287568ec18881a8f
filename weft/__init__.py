"""Weft weaves one training run across any number of devices.

Three layers: functions (`connect`, `parallelize`, `save`, `load`), the loop in `weft/train/loop.py`, `weft.train(job)`.
Nothing is imported until it is used: `import weft` costs nothing and changes nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Job": "weft.job",
    "load_job": "weft.job",
    "Plan": "weft.plan",
    "make_plan": "weft.plan",
    "Mesh": "weft.mesh",
    "connect": "weft.mesh",
    "parallelize": "weft.parallel.apply",
    "save": "weft.train.functions",
    "load": "weft.train.functions",
    "plan": "weft.plan",
    "train": "weft.train",
}
_ROOMS = ("plan", "train")
"""Rooms that can be called: weft.plan(job) and weft.train(job)."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if name in _ROOMS else getattr(home, name)
