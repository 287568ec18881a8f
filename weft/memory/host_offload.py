"""Offload of activations to host memory between forward and backward pass, with prefetch on the way back."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


@dataclass
class OffloadedTensors:
    """Tensors of one block, on the device or in host memory."""

    here: list[Tensor]
    there: list[Tensor] = field(default_factory=list)
    """Host copies; empty if the tensors stayed on the device."""
    shapes: list[tuple[torch.Size, torch.dtype, torch.device]] = field(default_factory=list)
    before: OffloadedTensors | None = None
    """The entry offloaded before this one, and so needed after it."""
    arrived: torch.cuda.Event | None = None
    forms: list[Form | None] = field(default_factory=list)
    """Of tensors that are stored in fp8, what they were."""


class HostOffload:
    """Host memory of a limited size. Copies run on their own stream, and pinned buffers are reused."""

    def __init__(self, device: torch.device, limit_gib: float):
        self.cuda = device.type == "cuda"
        self.free_bytes = int(limit_gib * 2**30)
        self.room: dict[int, list[Tensor]] = defaultdict(list)
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.last: OffloadedTensors | None = None

    def put(self, tensors: list[Tensor]) -> OffloadedTensors:
        """Start copying tensors to the host; they stay on the device if there is no room for all."""
        entry = OffloadedTensors(tensors, before=self.last)
        self.last = entry
        rooms = self._reserve([t.numel() * t.element_size() for t in tensors])
        if rooms is None:
            return entry
        entry.shapes = [(t.shape, t.dtype, t.device) for t in tensors]
        entry.there = rooms
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for tensor, room in zip(tensors, rooms, strict=True):
                room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
                if self.stream is not None:
                    tensor.record_stream(self.stream)
        entry.here = []
        return entry

    def get(self, entry: OffloadedTensors) -> list[Tensor]:
        """The tensors on the device; also starts fetching the entry before. An entry is read once."""
        self._fetch(entry)
        if entry.arrived is not None:
            torch.cuda.current_stream().wait_event(entry.arrived)
        if entry.before is not None:
            self._fetch(entry.before)
        if self.last is entry:
            self.last = entry.before
        here, entry.here, entry.before = entry.here, [], None
        return here

    def _fetch(self, entry: OffloadedTensors) -> None:
        if not entry.there:
            return
        # allocated on the compute stream; the copy waits for what is queued on it
        entry.here = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in entry.shapes]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for tensor, room in zip(entry.here, entry.there, strict=True):
                tensor.copy_(room.view(tensor.dtype).view(tensor.shape), non_blocking=True)
                self.room[room.numel()].append(room)  # the next copy into it is on the same stream
            if self.stream is not None:
                entry.arrived = self.stream.record_event()
        entry.there = []

    def _reserve(self, sizes: list[int]) -> list[Tensor] | None:
        found: list[Tensor] = []
        for size in sizes:
            if self.room[size]:
                found.append(self.room[size].pop())
            elif (taken := 1 << (size - 1).bit_length() if self.cuda else size) <= self.free_bytes:
                self.free_bytes -= taken  # torch allocates pinned memory in powers of two
                found.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.cuda))
            else:
                for room in found:
                    self.room[room.numel()].append(room)
                return None
        return found
