"""Rooms that are also verbs: `weft.plan(job)` and `weft.train(job)` call the room of that name."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(room: str, home: str, function: str) -> None:
    """Let the module `room` be called; the call goes to `function` in the module `home`, imported only then."""

    class Room(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(home), function)(*args, **kwargs)

    sys.modules[room].__class__ = Room
