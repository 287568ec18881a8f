"""The weights and optimizer state of one parameter server: staged gradients, updates, snapshots on disk."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.comm.foreach_internals import sums_of_squares
from weft.extensions.server.connections import Peer
from weft.optim.build_optimizers import Optimizers
from weft.wire.tensors import Answer, TensorChannel

Tensors = dict[str, Tensor]
KEPT_SNAPSHOTS = 2
"""Snapshots kept on disk, because a process may be killed while it writes one."""


def assign_weights(sizes: dict[str, int], servers: int) -> list[list[str]]:
    """Weight names by server, largest first to the least loaded; weights stay whole, so every optimizer works."""
    loads = [0] * servers
    dealt: list[list[str]] = [[] for _ in range(servers)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        lightest = loads.index(min(loads))
        dealt[lightest].append(name)
        loads[lightest] += sizes[name]
    return dealt


class ShardHandle(Protocol):
    """A local shard, or a link to a remote one."""

    def sum_staged(self, keys: list[str], keep: list[str]) -> float: ...

    def apply(self, lr: float, factor: float, version: int) -> None: ...

    def read(self, what: str) -> Tensors: ...

    def load(self, tensors: Tensors, version: int) -> None: ...

    def snapshot(self, meta: dict[str, Any]) -> None: ...

    def snapshots(self) -> list[int]: ...

    def restore(self, version: int) -> dict[str, Any]: ...


class Shard:
    """Weights by name, guarded by one lock: gradients, reads and updates come from several threads."""

    def __init__(self, master_params: Tensors, make: Callable[[Tensors], Optimizers], folder: Path, name: str):
        """`make` builds the job's optimizer over the given master params."""
        self.master_params, self.make, self.folder, self.name = master_params, make, folder, name
        self.optimizers = make(master_params)
        self.optimizers.allocate()
        self.version = 0
        self.extra: Tensors = {}
        """Other tensors to save, by checkpoint name."""
        self.lock = threading.Lock()
        self.staged: dict[str, Tensors] = {}

    def stage(self, key: str, grads: Tensors) -> None:
        """Keep a gradient until an update uses or drops it."""
        wrong = [n for n, m in self.master_params.items() if n not in grads or grads[n].shape != m.shape]
        if wrong:
            raise ValueError(f"the gradient of {wrong[0]} is missing or has another shape")
        with self.lock:
            self.staged[key] = grads

    @torch.no_grad()
    def sum_staged(self, keys: list[str], keep: list[str]) -> float:
        """Sum the staged gradients `keys` in this order and drop all others except `keep`. Returns the squared norm."""
        with self.lock:
            parts = [self.staged[key] for key in keys]
            self.staged = {k: g for k, g in self.staged.items() if k in keep}
            for name, master in self.master_params.items():
                total = parts[0][name].float()
                for part in parts[1:]:
                    total = total + part[name]
                master.grad = total.to(master.device)
            return float(sums_of_squares([m.grad for m in self.master_params.values() if m.grad is not None]).sum())

    def apply(self, lr: float, factor: float, version: int) -> None:
        """Take one optimizer step with the summed gradient times `factor`."""
        with self.lock:
            self.optimizers.step(lr, torch.tensor(factor))
            self.version = version
            for master in self.master_params.values():
                master.grad = None

    def read(self, what: str) -> Tensors:
        """Copies by checkpoint name: of the `weights`, or of weights and optimizer state (`all`)."""
        with self.lock:
            return {n: t.clone() for n, t in self._tensors(what).items()}

    def _tensors(self, what: str) -> Tensors:
        held = {f"model.{n}": m.detach() for n, m in self.master_params.items()}
        if what == "weights":
            return held
        return held | {f"optim.{n}": t for n, t in self.optimizers.state().items()} | self.extra

    def load(self, tensors: Tensors, version: int) -> None:
        """Start from these tensors, ignoring those of other shards, and delete older snapshots."""
        self._fill(tensors, version)
        for old in self.snapshots():
            self._path(old).unlink(missing_ok=True)

    @torch.no_grad()
    def _fill(self, tensors: Tensors, version: int) -> None:
        with self.lock:
            for name, tensor in self._tensors("all").items():
                if name in tensors:
                    tensor.copy_(tensors[name])
            self.version, self.staged = version, {}

    def snapshot(self, meta: dict[str, Any]) -> None:
        """Write the shard to disk; if the process is killed meanwhile, the previous snapshot remains."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.lock:
            held = {n: t.contiguous() for n, t in self._tensors("all").items()}
            path = self._path(self.version)
            save_file(held, path.with_suffix(".tmp"), {"meta": json.dumps(meta)})
        os.replace(path.with_suffix(".tmp"), path)
        for old in self.snapshots()[:-KEPT_SNAPSHOTS]:
            self._path(old).unlink(missing_ok=True)

    def snapshots(self) -> list[int]:
        """Versions on disk, oldest first."""
        return sorted(int(p.stem.rpartition("-")[2]) for p in self.folder.glob(f"{self.name}-*.safetensors"))

    def restore(self, version: int) -> dict[str, Any]:
        """Load a snapshot and delete newer ones, which other servers do not have. Returns its meta."""
        with safe_open(self._path(version), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta: dict[str, Any] = json.loads(file.metadata()["meta"])
        self._fill(tensors, version)
        for newer in self.snapshots():
            if newer > version:
                self._path(newer).unlink(missing_ok=True)
        return meta

    def _path(self, version: int) -> Path:
        return self.folder / f"{self.name}-{version}.safetensors"

    def handle(self, head: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
        """Answer a request from a link."""
        match head["do"]:
            case "stage":
                self.stage(head["key"], tensors)
                return {}, {}
            case "gather":
                return {"square": self.sum_staged(head["keys"], head["keep"])}, {}
            case "apply":
                self.apply(head["lr"], head["factor"], head["version"])
                return {}, {}
            case "read":
                return {}, self.read(head["what"])
            case "load":
                self.load(tensors, head["version"])
                return {}, {}
            case "snapshot":
                self.snapshot(head["meta"])
                return {}, {}
            case "snapshots":
                return {"versions": self.snapshots()}, {}
            case "restore":
                return {"meta": self.restore(head["version"])}, {}
        raise ValueError(f"unknown request {head['do']!r}")


class RemoteShard:
    """A shard on another server, through a link."""

    def __init__(self, link: TensorChannel):
        self.link = link

    def _ask(self, do: str, tensors: Tensors | None = None, **fields: Any) -> tuple[dict[str, Any], Tensors]:
        return self.link.request({"do": do, **fields}, tensors)

    def sum_staged(self, keys: list[str], keep: list[str]) -> float:
        return float(self._ask("gather", keys=keys, keep=keep)[0]["square"])

    def apply(self, lr: float, factor: float, version: int) -> None:
        self._ask("apply", lr=lr, factor=factor, version=version)

    def read(self, what: str) -> Tensors:
        return self._ask("read", what=what)[1]

    def load(self, tensors: Tensors, version: int) -> None:
        self._ask("load", tensors, version=version)

    def snapshot(self, meta: dict[str, Any]) -> None:
        self._ask("snapshot", meta=meta)

    def snapshots(self) -> list[int]:
        return list(self._ask("snapshots")[0]["versions"])

    def restore(self, version: int) -> dict[str, Any]:
        meta: dict[str, Any] = self._ask("restore", version=version)[0]["meta"]
        return meta


class ShardCoordinator:
    """Coordinator of a server other than the chief: passes requests to the shard."""

    def __init__(self, shard: Shard):
        self.shard = shard

    def joined(self, peer: Peer) -> None:
        """Nothing to do."""

    def left(self, peer: Peer) -> None:
        """Nothing to do: gradients it staged are dropped at the next update."""

    def handle(self, peer: Peer, head: dict[str, Any], tensors: Tensors) -> Answer:
        if peer.role == "worker" and head["do"] not in ("stage", "read"):
            raise ValueError(f"a worker may not request {head['do']!r}")
        return self.shard.handle(head, tensors)
