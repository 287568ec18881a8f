"""The job's optimizer over the masters, grouped so that each group is one fused call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm.pieces import like, local_of
from weft.job.schema import Optim
from weft.optim.adafactor import Adafactor
from weft.optim.muon import Muon

Params = dict[str, Tensor]


class Optimizers:
    """One or two torch optimizers that step as one. `state()` names every tensor by its parameter.

    Each works on `params`: the masters, or this rank's pieces of them where an element's update needs no other element.
    """

    def __init__(self, parts: list[torch.optim.Optimizer], masters: Params, params: Params):
        self.parts, self.masters, self.params = parts, masters, params
        self.names = {id(p): n for n, p in params.items()}

    def step(self, lr: float) -> None:
        for name, param in self.params.items():
            master = self.masters[name]
            if param is not master:
                param.data = local_of(master.detach())
                param.grad = None if master.grad is None else local_of(master.grad)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["lr_factor"]
            part.step()
        for name, param in self.params.items():
            if param is not self.masters[name]:
                param.grad = None  # else this step's gradients would live on beside the next one's

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state as NAME.KEY."""
        return {
            f"{self.names[id(param)]}.{key}": self._dressed(param, value)
            for part in self.parts
            for param, state in part.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def _dressed(self, param: Tensor, value: Tensor) -> Tensor:
        master = self.masters[self.names[id(param)]]
        return like(value, master) if param is not master and value.dim() else value

    def allocate(self) -> None:
        """Make the state exist, so that a checkpoint can be read into it: a step of rate 0 on zero gradients."""
        grads = {name: master.grad for name, master in self.masters.items()}  # they may be views of buckets
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        self.step(0.0)
        for name, master in self.masters.items():
            master.grad = grads[name]


def build_optimizers(optim: Optim, masters: Params, is_block: Callable[[str], bool]) -> Optimizers:
    """The job's optimizer. Matrices decay, vectors do not."""
    if optim.name != "muon":
        make, elementwise = _SINGLE[optim.name]
        params = {n: _piece(m) for n, m in masters.items()} if elementwise else masters
        return Optimizers([make(optim, params)], masters, params)
    inner = {n: p for n, p in masters.items() if p.dim() == 2 and is_block(n)}
    outer = {n: _piece(p) for n, p in masters.items() if n not in inner}
    parts: list[torch.optim.Optimizer] = []
    if inner:
        parts.append(Muon(_groups(inner, optim.weight_decay), optim.lr, optim.momentum, optim.weight_decay))
    if outer:
        parts.append(_adamw(optim, outer))
    return Optimizers(parts, masters, inner | outer)


def _piece(master: Tensor) -> Tensor:
    """What an element-wise optimizer works on: a plain tensor over the master's piece on this rank."""
    return nn.Parameter(local_of(master.detach())) if isinstance(master, DTensor) else master


def _adamw(optim: Optim, params: Params) -> torch.optim.Optimizer:
    groups = _groups(params, optim.weight_decay)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def _sgd(optim: Optim, params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(params, optim.weight_decay), lr=optim.lr, momentum=optim.momentum, fused=True)


def _adafactor(optim: Optim, masters: Params) -> torch.optim.Optimizer:
    return Adafactor(_groups(masters, optim.weight_decay), optim.lr)


_SINGLE: dict[str, tuple[Callable[[Optim, Params], torch.optim.Optimizer], bool]] = {
    "adamw": (_adamw, True),
    "sgd": (_sgd, True),
    "adafactor": (_adafactor, False),
}
"""Each optimizer, and whether it treats every element by itself."""


def _groups(params: Params, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in params.values() if p.dim() >= 2]
    vectors = [p for p in params.values() if p.dim() < 2]
    return [
        {"params": members, "weight_decay": decay, "lr_factor": 1.0}
        for members, decay in ((matrices, weight_decay), (vectors, 0.0))
        if members
    ]
