"""Horovod's elastic state: commits that a run continues from after ranks were lost or added.

torchrun restarts the processes (`torchrun --max-restarts`, also with `--nnodes 1:4`). A commit is a checkpoint without
a layout, so the new processes continue from it, however many they are.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.save_load import load, save
from weft.extensions.adapters.hvd.operations import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    init,
    joined,
)
from weft.extensions.adapters.training import create_state, plain_values
from weft.job.errors import JobError

FOLDER = "WEFT_ELASTIC_DIR"
DEFAULT_FOLDER = "runs/elastic"


def restart_count() -> int:
    """How often torchrun has restarted this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class TorchState:
    """A model, an optimizer and numbers such as batch=0 and epoch=0, which are committed and restored together."""

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, folder: str | Path | None = None,
        **values: Any,
    ):  # fmt: skip
        self.model, self.optimizer = model, optimizer
        self.folder = Path(folder or os.environ.get(FOLDER, DEFAULT_FOLDER))
        self._names, self._commits = tuple(values), 0
        self._callbacks: list[Callable[[], None]] = []
        for name, value in values.items():
            setattr(self, name, value)
        self._saved: tuple[Any, Any, dict[str, Any]] | None = None

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions that are called after a restart, for example to scale the learning rate."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        for callback in self._callbacks:
            callback()

    def save(self) -> None:
        """Keep a copy in memory, for restore()."""
        model = copy.deepcopy(self.model.state_dict()) if self.model is not None else None
        optimizer = copy.deepcopy(self.optimizer.state_dict()) if self.optimizer is not None else None
        self._saved = (model, optimizer, copy.deepcopy(self._values()))

    def restore(self) -> None:
        """Go back to the last save() or commit()."""
        if self._saved is None:
            return
        model, optimizer, values = self._saved
        if self.model is not None:
            self.model.load_state_dict(model)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        for name, value in values.items():
            setattr(self, name, copy.deepcopy(value))

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.model is not None:
            found |= {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.optimizer is not None:
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            if not inner.state:
                create_state(inner)
            params = [p for group in inner.param_groups for p in group["params"]]
            for i, param in enumerate(params):
                held = inner.state.get(param, {})
                found |= {f"optim.{i}.{k}": v for k, v in held.items() if isinstance(v, Tensor)}
        return found

    def commit(self) -> None:
        """Save in memory and as a checkpoint on disk. Call it on every rank."""
        values = plain_values(self._values())
        if lost := [name for name in self._names if name not in values]:
            raise JobError(f"state.{lost[0]} cannot be written as JSON; use a number, text or a list")
        self.save()
        self._commits += 1
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        plain = [plain_values({k: v for k, v in g.items() if k != "params"}) for g in groups]
        meta = {"values": values, "param_groups": plain, "commits": self._commits}
        save(self.folder, self._tensors(), joined().mesh, step=self._commits, meta=meta)

    def check_host_updates(self) -> None:
        """Nothing to check: torchrun restarts the processes when ranks join."""

    def sync(self) -> None:
        """Make the state of all ranks that of rank 0."""
        if self.model is not None:
            broadcast_parameters(self.model.state_dict(), root_rank=0)
        if self.optimizer is not None:
            broadcast_optimizer_state(self.optimizer, root_rank=0)
        for name, value in broadcast_object(plain_values(self._values())).items():
            setattr(self, name, value)
        self.save()

    def load_commit(self) -> bool:
        """Load the newest commit on disk. Returns whether there was one."""
        with torch.no_grad():
            found = load(self.folder, self._tensors(), joined().mesh)
        if found is None:
            return False
        self._commits = int(found["commits"])
        for name, value in found["values"].items():
            setattr(self, name, value)
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        for group, values in zip(groups, found["param_groups"], strict=False):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        return True


ObjectState = TorchState


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates train(state, …): it starts from the newest commit if torchrun has restarted the run."""

    @functools.wraps(function)
    def start(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        init()
        if restart_count() > 0 and state.load_commit():
            state.on_reset()
        state.sync()
        return function(state, *args, **kwargs)

    return start
