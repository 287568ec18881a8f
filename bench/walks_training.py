"""The files of Weft that a step passes through: a batch from its source to the loss, a gradient to the update, a
checkpoint to the disk.

    python bench/walks_training.py

traces the second step of a small run of one process, and of two ranks of data parallelism. Files that the step only
asks for settings (weft/job, weft/planner), and those that watch it, are listed apart; so are those of the model in the
walk of a gradient, which begins where autograd has computed the gradient of a weight.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import weft
from weft.job.load import load_job

SETTINGS_FILES = ("job/", "planner/")
WATCHING_FILES = (
    "supervisor/", "guards/", "watch/", "training/figures/", "training/step_observers.py",
    "checkpoint/memory_snapshots.py", "comm/meter.py",
)  # fmt: skip
PACKAGE = str(Path(weft.__file__).parent) + "/"
SETTINGS = (
    "train.steps=2", "train.global_batch=4", "train.eval_every=0", "data.seq_len=16", "data.prefetch=0",
    "checkpoint.every=1", "checkpoint.background=false", "cluster.device=cpu",
)  # fmt: skip
LAYOUTS = {1: ("cluster.devices_per_node=1",), 2: ("parallel.dp_replicate=2", "parallel.dp_shard=1")}
"""By the number of ranks."""


class Walks:
    """Files of Weft in the order of their first call, by the name of what passes through them."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}
        self._name = ""

    def begin(self, name: str) -> None:
        """Start a walk; one of an earlier step with this name is forgotten."""
        self._name = name
        self.files[name] = []

    def end(self) -> None:
        self._name = ""

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For sys.setprofile."""
        path = frame.f_code.co_filename
        if event != "call" or not self._name or not path.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        files, file = self.files[self._name], path.removeprefix(PACKAGE)
        if file not in files:
            files.append(file)

    @contextmanager
    def traced(self) -> Iterator[None]:
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


@contextmanager
def around(owner: type, name: str, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call `before` and `after` around each call of a method."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        result = method(*args, **kwargs)
        after()
        return result

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, method)


def nothing() -> None:
    pass


def on_the_way(subject: str, files: list[str]) -> list[str]:
    """The files that work on the batch, the gradients or the checkpoint."""
    apart = (*SETTINGS_FILES, *WATCHING_FILES, *(("models/",) if subject == "gradient to update" else ()))
    return [file for file in files if not file.startswith(apart)]


def walk(layout: tuple[str, ...], folder: Path) -> dict[str, list[str]]:
    """The walks of this rank's second step."""
    import torch

    from weft.checkpoint.checkpointer import Checkpointer
    from weft.data.loader import Loader
    from weft.job.files.run_folder import RunDir
    from weft.planner import make_plan
    from weft.training.loop import fit
    from weft.training.open_session import open_session
    from weft.training.step import Stepper
    from weft.training.stop_requests import Signals

    job, plan = make_plan(load_job("tiny", [*SETTINGS, *layout]))
    walks, run = Walks(), RunDir(folder)
    session = open_session(job, plan, run)
    with (
        around(Loader, "__next__", lambda: walks.begin("batch to loss"), nothing),
        around(torch.Tensor, "backward", lambda: walks.begin("gradient to update"), nothing),
        around(Stepper, "update", nothing, walks.end),
        around(Checkpointer, "save", lambda: walks.begin("checkpoint to disk"), walks.end),
        walks.traced(),
    ):
        fit(session, Signals())
    session.mesh.barrier()
    session.close()
    return walks.files


def main() -> None:
    from weft.launch.rank_pool import RankPool

    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for world, layout in LAYOUTS.items():
            run = Path(folder, str(world))
            (run / "logs").mkdir(parents=True)
            for subject, files in pool.run(walk, world, layout, run)[0].items():
                path = on_the_way(subject, files)
                print(f"{world} ranks: {subject}: {len(path)} files\n  " + "\n  ".join(path))
                print("  apart: " + " ".join(file for file in files if file not in path))


if __name__ == "__main__":
    main()
