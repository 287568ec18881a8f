"""What stands in a model for a tower that is spread by itself: it moves samples to the tower and vectors back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.extensions.vision.clip.sample_exchange import SampleExchange, moved_to_owners, moved_to_tower
from weft.job.errors import JobError
from weft.mesh import Mesh


class TowerCall(nn.Module):
    """Calls a tower with the samples that this rank computes. The tower is not one of its submodules: its parameters
    belong to a SpreadModel of their own."""

    def __init__(self, name: str, tower: nn.Module | None, exchange: SampleExchange | None, mesh: Mesh, trained: bool):
        """`tower` is None on ranks that do not hold it, `exchange` where every rank computes its own samples."""
        super().__init__()
        self.name, self.held, self.exchange, self.mesh, self.is_trained = name, (tower,), exchange, mesh, trained
        self.formats: dict[str, tuple[list[int], torch.dtype]] = {}
        """Shape of a vector and its dtype, by the inputs' shapes, for ranks that do not compute any."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        tower = self.held[0]
        if self.exchange is None:
            assert tower is not None
            out: Tensor = tower(*args, **named)
            return out
        tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
        if not tensors:
            raise JobError(f"parallel.towers: {self.name} is called without a tensor; give it inputs [batch, ...]")
        rows, exchange = tensors[0].shape[0], self.exchange
        args = tuple(self._moved(x, rows) for x in args)
        named = {key: self._moved(x, rows) for key, x in named.items()}
        found = (
            None if tower is None else self._checked(tower(*args, **named), len(exchange.share(self.mesh.rank, rows)))
        )
        shape, dtype = self._format(found, tensors)
        if found is None:
            found = torch.zeros(0, *shape, dtype=dtype, device=self.mesh.device, requires_grad=self.is_trained)
        return moved_to_owners(found, exchange, rows)

    def _moved(self, value: Any, rows: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0 or value.shape[0] != rows:
            raise JobError(
                f"parallel.towers: {self.name} is called with a tensor of shape {list(value.shape)} beside one of "
                f"{rows} samples; give it inputs [batch, ...]"
            )
        assert self.exchange is not None
        return moved_to_tower(value.contiguous(), self.exchange, rows)

    def _checked(self, out: Any, rows: int) -> Tensor:
        if not isinstance(out, Tensor) or out.dim() == 0 or out.shape[0] != rows:
            given = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise JobError(f"parallel.towers: {self.name} gives {given} for {rows} samples; return [batch, ...]")
        return out.contiguous()

    def _format(self, found: Tensor | None, tensors: list[Tensor]) -> tuple[list[int], torch.dtype]:
        """Shape and dtype of a vector, as the ranks with the tower have it."""
        key = str(([(list(x.shape[1:]), str(x.dtype)) for x in tensors], self.training))
        if key not in self.formats:
            mine = None if found is None else (list(found.shape[1:]), str(found.dtype).removeprefix("torch."))
            shape, dtype = next(value for value in self.mesh.all_gather_json(mine) if value is not None)
            self.formats[key] = list(shape), getattr(torch, dtype)
        return self.formats[key]
