"""The job's optimizer over the masters, grouped so that each group is one fused call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.job.schema import Optim
from weft.optim.adafactor import Adafactor
from weft.optim.muon import Muon

Names = dict[int, str]


class Optimizers:
    """One or two torch optimizers that step as one. `state()` names every tensor by its parameter."""

    def __init__(self, parts: list[torch.optim.Optimizer], masters: dict[str, Tensor]):
        self.parts = parts
        self.names: Names = {id(p): n for n, p in masters.items()}
        self.masters = masters

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["lr_factor"]
            part.step()

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state as NAME.KEY."""
        return {
            f"{self.names[id(param)]}.{key}": value
            for part in self.parts
            for param, state in part.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def allocate(self) -> None:
        """Make the state exist, so that a checkpoint can be read into it: a step of rate 0 on zero gradients."""
        grads = {name: master.grad for name, master in self.masters.items()}  # they may be views of buckets
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        self.step(0.0)
        for name, master in self.masters.items():
            master.grad = grads[name]


def build_optimizers(optim: Optim, masters: dict[str, Tensor], is_block: Callable[[str], bool]) -> Optimizers:
    """The job's optimizer. Matrices decay, vectors do not; tensors cut over different meshes go in different groups."""
    if optim.name == "muon":
        inner = {n: p for n, p in masters.items() if p.dim() == 2 and is_block(n)}
        outer = {n: p for n, p in masters.items() if n not in inner}
        parts: list[torch.optim.Optimizer] = []
        if inner:
            parts.append(Muon(_groups(inner, optim.weight_decay), optim.lr, optim.momentum, optim.weight_decay))
        if outer:
            parts.append(_adamw(optim, outer))
        return Optimizers(parts, masters)
    return Optimizers([_SINGLE[optim.name](optim, masters)], masters)


def _adamw(optim: Optim, masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    groups = list(_groups(masters, optim.weight_decay))
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def _sgd(optim: Optim, masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    groups = list(_groups(masters, optim.weight_decay))
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=True)


def _adafactor(optim: Optim, masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    return Adafactor(_groups(masters, optim.weight_decay), optim.lr)


_SINGLE: dict[str, Callable[[Optim, dict[str, Tensor]], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adafactor": _adafactor,
}


def _groups(masters: dict[str, Tensor], weight_decay: float) -> Iterator[dict[str, Any]]:
    found: dict[tuple[bool, Any], list[Tensor]] = {}
    for master in masters.values():
        mesh = master.device_mesh if isinstance(master, DTensor) else None
        found.setdefault((master.dim() >= 2, mesh), []).append(master)
    for (decays, _), params in found.items():
        yield {"params": params, "weight_decay": weight_decay if decays else 0.0, "lr_factor": 1.0}
