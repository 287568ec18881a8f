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
from weft.extensions.adapters.hvd.elastic_sampler import ElasticSampler
from weft.extensions.adapters.hvd.objects import broadcast_object
from weft.extensions.adapters.hvd.session import init, joined
from weft.extensions.adapters.hvd.training_state import broadcast_optimizer_state, broadcast_parameters
from weft.extensions.adapters.training import create_state, plain_values
from weft.job.errors import JobError

FOLDER = "WEFT_ELASTIC_DIR"
DEFAULT_FOLDER = "runs/elastic"


def restart_count() -> int:
    """How often torchrun has restarted this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class TorchState:
    """Models, optimizers, samplers and numbers such as batch=0 and epoch=0, committed and restored together."""

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, folder: str | Path | None = None,
        **values: Any,
    ):  # fmt: skip
        self.folder = Path(folder or os.environ.get(FOLDER, DEFAULT_FOLDER))
        self._names, self._commits = tuple(values), 0
        self._callbacks: list[Callable[[], None]] = []
        self.model, self.optimizer = model, optimizer
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def _parts(self, kind: type) -> dict[str, Any]:
        """The attributes of a kind, by name."""
        parts = {name: getattr(self, name) for name in ("model", "optimizer", *self._names)}
        return {name: part for name, part in parts.items() if isinstance(part, kind)}

    def _values(self) -> dict[str, Any]:
        parts = (nn.Module, Optimizer, ElasticSampler)
        return {name: value for name in self._names if not isinstance(value := getattr(self, name), parts)}

    def _samplers(self) -> dict[str, dict[str, Any]]:
        return {name: sampler.state_dict() for name, sampler in self._parts(ElasticSampler).items()}

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions that are called after a restart, for example to scale the learning rate."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        for callback in self._callbacks:
            callback()

    def save(self) -> None:
        """Keep a copy in memory, for restore()."""
        parts = {**self._parts(nn.Module), **self._parts(Optimizer), **self._parts(ElasticSampler)}
        self._saved = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        self._saved_values = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Go back to the last save(), commit() or sync()."""
        for name, state in self._saved.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        for name, value in self._saved_values.items():
            setattr(self, name, copy.deepcopy(value))

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, model in self._parts(nn.Module).items():
            tensors |= {f"{name}.{key}": value for key, value in model.state_dict().items()}
        for name, optimizer in self._parts(Optimizer).items():
            if not optimizer.state:
                create_state(optimizer)
            prefix = "optim" if name == "optimizer" else name
            for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state.get(param, {})
                tensors |= {f"{prefix}.{i}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        return tensors

    def _groups(self) -> list[list[dict[str, Any]]]:
        """The groups of every optimizer."""
        return [optimizer.param_groups for optimizer in self._parts(Optimizer).values()]

    def commit(self) -> None:
        """Save in memory and as a checkpoint on disk. Call it on every rank."""
        values = plain_values(self._values())
        if lost := [name for name in self._values() if name not in values]:
            raise JobError(f"state.{lost[0]} cannot be written as JSON; use a number, text or a list")
        self.save()
        self._commits += 1
        groups = [
            [plain_values({k: v for k, v in group.items() if k != "params"}) for group in groups]
            for groups in self._groups()
        ]
        meta = {"values": values, "samplers": self._samplers(), "param_groups": groups, "commits": self._commits}
        save(self.folder, self._tensors(), joined().mesh, step=self._commits, meta=meta)

    def check_host_updates(self) -> None:
        """Nothing to check: torchrun restarts the processes when ranks join."""

    def sync(self) -> None:
        """Make the state of all ranks that of rank 0."""
        for model in self._parts(nn.Module).values():
            broadcast_parameters(model.state_dict(), root_rank=0)
        for optimizer in self._parts(Optimizer).values():
            broadcast_optimizer_state(optimizer, root_rank=0)
        values, samplers = broadcast_object((self._values(), self._samplers()))
        for name, value in values.items():
            setattr(self, name, value)
        for name, state in samplers.items():
            getattr(self, name).load_state_dict(state)
        self.save()

    def load_commit(self) -> bool:
        """Load the newest commit on disk. Returns whether there was one."""
        with torch.no_grad():
            meta = load(self.folder, self._tensors(), joined().mesh)
        if meta is None:
            return False
        self._commits = int(meta["commits"])
        for name, value in meta["values"].items():
            setattr(self, name, value)
        for name, state in meta["samplers"].items():
            getattr(self, name).load_state_dict(state)
        for groups, saved in zip(self._groups(), meta["param_groups"], strict=True):
            for group, options in zip(groups, saved, strict=True):
                group.update({k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
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
