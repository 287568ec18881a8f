"""`log_with`, `init_trackers` and `log` of Accelerate, on Weft's trackers."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.watch import TRACKERS
from weft.watch.tracker_adapter import TrackedRun, TrackedStep


class OwnTracker:
    """A tracker of a script: its values by step."""

    def __init__(self, kind: str, project: str, config: dict[str, Any], folder: Path):
        self.name, self.steps = kind, 0
        self.tracker = find_object(TRACKERS[kind].builder, "log_with")(TrackedRun(project, folder, config, {}))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.steps = self.steps + 1 if step is None else int(step)
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float) or _is_one_number(v)}
        self.tracker.log([TrackedStep(self.steps, time.time(), numbers)])

    def finish(self) -> None:
        self.tracker.finish("done", None)


def _is_one_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def chosen_trackers(log_with: Any) -> list[str]:
    """The names of the trackers of `log_with`: one, a list, or all that are installed."""
    asked = log_with if isinstance(log_with, list | tuple) else [log_with]
    names = [str(getattr(each, "value", each)) for each in asked if each is not None]
    if "all" in names:
        return [name for name in TRACKERS.names() if importlib.util.find_spec(name) is not None]
    for name in names:
        if name not in TRACKERS:
            raise JobError(f"log_with={name!r} is not supported; {', '.join(TRACKERS.names())} or all would work")
    return names
