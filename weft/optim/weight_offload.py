"""Weights and master weights in host memory: of which units, and their copies on the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.shards import like, local_of
from weft.memory.host_copies import Copies
from weft.memory.split_master import copy_rounded
from weft.memory.weight_stream import WeightStream
from weft.mesh import Mesh
from weft.optim.build_optimizers import Params


class OffloadedWeights:
    """Weights in host memory, and the fp32 master weights beside them where these are copies."""

    def __init__(self, model: Any, mesh: Mesh, split: bool, copies: Copies | None = None):
        self.model, self.split = model, split
        self.master_params: Params = model.master_params
        self.compute_params: Params = model.compute_params
        parts = model.parts
        found = parts[0].weights
        self.stream: WeightStream = WeightStream(mesh.device, copies=copies) if found is None else found
        if copies is not None:
            self.stream.copies = copies
        self.masters = WeightStream(mesh.device, "master weights", self.stream.copies)
        apart = bool(self.compute_params) and not split
        for part in parts:
            own = part.data.master_params
            for unit in part.away:
                inside = [n for n in own if n.startswith(f"{unit}.")]
                if unit not in self.stream.units:
                    weights = dict(part.module.get_submodule(unit).named_parameters(prefix=unit))
                    self.stream.park(unit, weights)
                if apart:
                    self.masters.park(unit, {n: own[n] for n in inside})
            part.data.elsewhere = self.stream.names() if part.away else set()

    def begin(self) -> None:
        """Free the device and the counters after the start of a run."""
        self.drop()
        self.stream.moved.clear()
        self.masters.moved.clear()

    def enter(self, unit: str, phase: str) -> None:
        """Have the weights of a unit on the device, to update them."""
        self.stream.update(unit, phase)
        self.masters.update(unit, phase)

    def changed(self, unit: str, phase: str) -> None:
        """Copy the updated weights of a unit to host memory."""
        self.stream.changed(unit, phase)
        self.masters.changed(unit, phase)

    def master_home(self, name: str) -> Tensor | None:
        """A master weight in host memory, or None if it is on the device."""
        return (self.masters if self.masters.units else self.stream).home(name)

    def compute_home(self, name: str) -> Tensor:
        """The values of a compute weight on this rank, where they live."""
        home = self.stream.home(name)
        return local_of(self.compute_params[name].detach()) if home is None else home

    def at_home(self, weights: Params) -> Params:
        """Some weights of the model, those in host memory as they are there."""
        return {n: w if (home := self.master_home(n)) is None else like(home, w) for n, w in weights.items()}

    def frozen(self, weights: Params) -> Params:
        """The same for weights that are not trained."""
        return {n: w if (home := self.stream.home(n)) is None else like(home, w) for n, w in weights.items()}

    @torch.no_grad()
    def write_master(self, name: str, value: Tensor) -> None:
        """Take over a master weight that was loaded in place: renew the compute weight beside it in host memory."""
        if self.masters.units and (home := self.stream.home(name)) is not None:
            copy_rounded([home], [local_of(value)])

    def settle(self) -> None:
        """Wait until all updated weights are in host memory."""
        self.stream.settle()
        self.masters.settle()

    def drop(self) -> None:
        """Free the weights on the device: those in host memory have changed."""
        self.stream.drop()
        self.masters.drop()

    def watch(self, units: dict[str, nn.Module]) -> None:
        """Have each unit's weights on the device in its passes."""
        self.stream.watch(units)

    @property
    def moved(self) -> Counter[tuple[str, str, str, str]]:
        """Bytes copied, by kind, from, to, and phase."""
        return self.stream.moved + self.masters.moved
