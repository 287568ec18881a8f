"""Gradients in host memory: each is copied there, and freed on the device, as the backward pass produces it.

Sums over microbatches are made on the device: the sum so far is fetched, the new gradient added, and the result stored.
The sum of squares of each gradient is taken before it leaves, so that clipping is exact.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from weft.comm.foreach_internals import largest_of, sums_of_squares
from weft.memory.host_copies import Copies, Event, make_copies
from weft.memory.host_memory import allocate_host
from weft.precision import FP16_OVERFLOW

Part = tuple[str, int, int | None]
"""Some rows of a weight's gradient: its name, the first and the end, None for all."""


class OffloadedGradients:
    """Gradients of some weights in host memory, in fp32 if a step sums several."""

    def __init__(self, weights: dict[str, nn.Parameter], summed: bool, device: torch.device):
        self.device, self.summed = device, summed
        self.copies: Copies = make_copies(device)
        shapes = [(tuple(w.shape), torch.float32 if summed else w.dtype) for w in weights.values()]
        self.host = dict(zip(weights, allocate_host(shapes, device, self), strict=True))
        self.moved: Counter[tuple[str, str, str, str]] = Counter()
        """Bytes copied, by kind, from, to, and phase."""
        self.stored: dict[str, Event] = {}
        self.seen: set[str] = set()
        """Weights that got a gradient in this step."""
        self.squares: dict[str, Tensor] = {}
        """Of the last step, by weight."""
        self.ahead: dict[Part, tuple[Tensor, Event]] = {}
        """Gradients on their way to the device."""
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))

    def __contains__(self, name: str) -> bool:
        return name in self.host

    def begin(self) -> None:
        """Begin a step."""
        self.seen.clear()

    def take(self, name: str, weight: Tensor) -> None:
        """Move a gradient that autograd has just computed to host memory."""
        grad, weight.grad = weight.grad, None
        assert grad is not None
        with torch.no_grad():
            if name in self.seen:
                total, arrived = self._fetch((name, 0, None), "backward")
                self.copies.wait(arrived)
                total.add_(grad)
            else:
                total = grad.float() if self.summed else grad
            self.seen.add(name)
            self.squares[name] = sums_of_squares([total])[0]
            if weight.dtype == torch.float16:  # as grad_norm() tests the gradients on the device
                self.squares[name].masked_fill_(largest_of([total]) >= FP16_OVERFLOW, torch.inf)
            self._store(name, total)

    def _store(self, name: str, total: Tensor) -> None:
        self.stored[name] = self.copies.store([(self.host[name], total)], [self.copies.mark()])
        if total.is_cuda:  # its memory is not used again before it was copied
            total.record_stream(self.copies.outward)  # type: ignore[attr-defined]
        self.moved["gradients", "device", "host", "backward"] += total.numel() * total.element_size()

    def finish(self) -> None:
        """After the last backward pass: a weight that was not used has a gradient of zeros."""
        for name in self.host.keys() - self.seen:
            self.squares[name] = torch.zeros((), dtype=torch.float64, device=self.device)
            self._store(name, torch.zeros_like(self.host[name], device=self.device))

    def prefetch(self, parts: Sequence[Part], phase: str) -> None:
        """Start to fetch gradients for an update."""
        for part in parts:
            if part[0] in self.host and part not in self.ahead:
                self.ahead[part] = self._fetch(part, phase)

    def fetch(self, part: Part, phase: str) -> Tensor:
        """A gradient on the device."""
        values, arrived = self.ahead.pop(part) if part in self.ahead else self._fetch(part, phase)
        self.copies.wait(arrived)
        return values

    def _fetch(self, part: Part, phase: str) -> tuple[Tensor, Event]:
        name, first, end = part
        source = self.host[name][first:end]
        values = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        self.moved["gradients", "host", "device", phase] += values.numel() * values.element_size()
        return values, self.copies.fetch([(values, source)], [self.copies.mark(), self.stored[name]])


def _hook(owner: weakref.ref[OffloadedGradients], name: str) -> Callable[[Tensor], None]:
    """A hook with a weak reference to its owner, which autograd's hooks would keep alive otherwise."""

    def gradient_ready(weight: Tensor) -> None:
        if (gradients := owner()) is not None:
            gradients.take(name, weight)

    return gradient_ready
