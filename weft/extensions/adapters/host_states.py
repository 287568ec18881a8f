"""Optimizer states that live in host memory and come to the device for each update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNK_BYTES = 256 * 2**20
"""Bytes of weights whose states are on the device at a time."""


class HostStates:
    """Updates the weights of an optimizer chunk by chunk: the same values as one step of it, if it updates each weight
    by itself, as Adam, SGD and Adagrad do."""

    def __init__(self, optimizer: Optimizer, device: torch.device, chunk_bytes: int = CHUNK_BYTES):
        self.optimizer, self.device, self.chunk_bytes = optimizer, device, chunk_bytes

    def _chunks(self) -> Iterator[list[list[Tensor]]]:
        """Weights by group, of about chunk_bytes."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        chunk: list[list[Tensor]] = [[] for _ in groups]
        size = 0
        for number, params in enumerate(groups):
            for param in params:
                chunk[number].append(param)
                size += param.numel() * param.element_size()
                if size >= self.chunk_bytes:
                    yield chunk
                    chunk, size = [[] for _ in groups], 0
        if size:
            yield chunk

    def _move(self, params: list[list[Tensor]], device: torch.device) -> None:
        for param in (p for group in params for p in group):
            state: dict[str, Any] = self.optimizer.state.get(param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[name] = value.to(device)

    def step(self) -> None:
        """One step of the optimizer."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for chunk in list(self._chunks()):
                for group, params in zip(groups, chunk, strict=True):
                    group["params"] = params
                self._move(chunk, self.device)
                self.optimizer.step()
                self._move(chunk, torch.device("cpu"))
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
