"""Weights in host memory, copied to the device unit by unit.

A unit's weights are fetched right before its forward pass and again before its backward pass, while the unit before it
computes, and their device memory is freed when the next unit begins. Memory is freed by resizing the storage, so views
of a weight that autograd has saved stay valid.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.shards import local_of
from weft.memory.host_copies import Copies, Event, make_copies
from weft.memory.host_memory import allocate_host


@dataclass
class _UnitWeights:
    """The weights of one unit, by name."""

    here: dict[str, Tensor] = field(default_factory=dict)
    """On the device; their storage is empty while the unit is not there."""
    host: dict[str, Tensor] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    present: bool = False
    arrived: Event | None = None
    stored: Event | None = None

    def resize(self, full: bool) -> None:
        for tensor in self.here.values():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() if full else 0)

    def bytes(self, names: set[str] | None = None) -> int:
        return sum(t.numel() * t.element_size() for n, t in self.host.items() if names is None or n in names)


class WeightStream:
    """The units whose weights live in host memory, in the order of the forward pass."""

    def __init__(self, device: torch.device, kind: str = "weights", copies: Copies | None = None):
        self.device, self.kind, self.copies = device, kind, copies or make_copies(device)
        self.units: dict[str, _UnitWeights] = {}
        self.order: list[str] = []
        self.moved: Counter[tuple[str, str, str, str]] = Counter()
        """Bytes copied, by kind, from, to, and phase."""

    @torch.no_grad()
    def park(self, unit: str, weights: dict[str, Tensor]) -> None:
        """Move a unit's matrices to host memory. Vectors stay: they are not worth a copy."""
        own = _UnitWeights(trained={n for n, w in weights.items() if w.requires_grad})
        for name, weight in weights.items():
            local = local_of(weight.detach())
            if local.dim() < 2 or not local.numel():
                continue
            if local.untyped_storage().nbytes() != local.numel() * local.element_size():  # a view of something larger
                weight_data = local_of(weight)
                weight_data.data = local.clone(memory_format=torch.contiguous_format)
                local = weight_data.detach()
            own.here[name] = local.data  # writing to it does not count as a change of the weight for autograd
        shapes = [(tuple(t.shape), t.dtype) for t in own.here.values()]
        own.host = dict(zip(own.here, allocate_host(shapes, self.device, self), strict=True))
        for name, tensor in own.here.items():
            own.host[name].copy_(tensor)
        own.resize(full=False)
        self.units[unit] = own
        self.order.append(unit)

    def home(self, name: str) -> Tensor | None:
        """A weight's values in host memory, or None if it is on the device. Call settle() before."""
        return next((own.host[name] for own in self.units.values() if name in own.host), None)

    def names(self) -> set[str]:
        """The weights that live in host memory."""
        return {n for own in self.units.values() for n in own.host}

    def enter(self, unit: str, phase: str, following: str, keep: bool = False) -> None:
        """Have a unit's weights on the device, start to fetch those of the unit that follows, and free the others.
        With `keep`, nothing is freed if the unit is there."""
        wanted = (unit, following)
        for name, own in self.units.items() if not (keep and self.units[unit].present) else ():
            if own.present and name not in wanted:
                self._drop(own)
        for name in wanted:
            if not self.units[name].present:
                self._fetch(self.units[name], phase)
        own = self.units[unit]
        if own.arrived is not None:
            self.copies.wait(own.arrived)
            own.arrived = None

    def update(self, unit: str, phase: str) -> None:
        """Before a unit's update. In a pass only those that are there for the pass are."""
        if unit in self.units:
            keep = phase in ("forward", "backward")
            self.enter(unit, phase, unit if keep else self._neighbour(unit, 1), keep=keep)

    def _neighbour(self, unit: str, step: int) -> str:
        return self.order[(self.order.index(unit) + step) % len(self.order)]

    def forward(self, unit: str, phase: str = "forward") -> None:
        """Before a unit's forward pass. The backward pass begins with the last unit, so those before it stay."""
        if unit in self.units:
            turns = torch.is_grad_enabled() and unit == self.order[-1]
            self.enter(unit, phase, self._neighbour(unit, -1 if turns else 1))

    def backward(self, unit: str) -> None:
        """Before a unit's backward pass."""
        if unit in self.units:
            self.enter(unit, "backward", self._neighbour(unit, 1 if unit == self.order[0] else -1))

    def changed(self, unit: str, phase: str) -> None:
        """Copy a unit's updated weights to host memory."""
        if (own := self.units.get(unit)) is None:
            return
        pairs = [(own.host[n], tensor) for n, tensor in own.here.items() if n in own.trained]
        own.stored = self.copies.store(pairs, [self.copies.mark()])
        self.moved[self.kind, "device", "host", phase] += own.bytes(own.trained)

    def _fetch(self, own: _UnitWeights, phase: str) -> None:
        # allocated on the compute stream: the copy waits for what was queued there before
        own.resize(full=True)
        after = [self.copies.mark()] + ([] if own.stored is None else [own.stored])
        own.arrived = self.copies.fetch([(tensor, own.host[n]) for n, tensor in own.here.items()], after)
        own.present, own.stored = True, None
        self.moved[self.kind, "host", "device", phase] += own.bytes()

    def _drop(self, own: _UnitWeights) -> None:
        for event in (own.arrived, own.stored):
            if event is not None:
                self.copies.wait(event)
        own.resize(full=False)
        own.present, own.arrived = False, None

    def settle(self) -> None:
        """Wait until updated weights are in host memory."""
        for own in self.units.values():
            if own.stored is not None:
                self.copies.finish(own.stored)

    def drop(self) -> None:
        """Free all weights on the device: those in host memory have changed."""
        self.settle()
        for own in self.units.values():
            if own.present:
                self._drop(own)

    def watch(self, units: dict[str, nn.Module]) -> None:
        """Have each unit's weights on the device in its passes."""
        for name, module in units.items():
            if name in self.units:
                module.register_forward_pre_hook(lambda m, args, name=name: self.forward(name), prepend=True)
                module.register_forward_hook(lambda m, args, out, name=name: self._watch_output(name, out))

    def _watch_output(self, unit: str, out: Any) -> None:
        for tensor in _tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self.backward(unit))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, list | tuple) else []


def streamed_units(sizes: dict[str, int], share: float) -> list[str]:
    """Units, spread evenly, whose weights make up a share of all."""
    chosen, missing = [], 0.0
    for name, size in sizes.items():
        missing += share * size
        if size and missing >= size / 2:
            chosen.append(name)
            missing -= size
    return chosen
