"""A model whose towers are spread by themselves, with the interface of a SpreadModel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.parallel.data.data_parallel import nothing
from weft.parallel.spread_model import Batch, LossOf, SpreadModel


@dataclass
class TowerModel(SpreadModel):
    """What is outside of the towers is spread by the plan; `towers` are those of this rank, each by its own layout."""

    towers: tuple[SpreadModel, ...] = ()

    def _named(self, attribute: str) -> dict[str, Tensor]:
        """An attribute of all towers, by the weights' names in the whole model."""
        return {n: t for tower in self.towers for n, t in getattr(tower, attribute).items()}

    @property
    def master_params(self) -> dict[str, Tensor]:
        return super().master_params | self._named("master_params")

    @property
    def grad_params(self) -> dict[str, Tensor]:
        return super().grad_params | self._named("grad_params")

    @property
    def compute_params(self) -> dict[str, Tensor]:
        return super().compute_params | self._named("compute_params")

    @property
    def parts(self) -> list[SpreadModel]:
        return [self, *self.towers]

    @property
    def counted(self) -> list[Tensor]:
        return [*super().counted, *(p for tower in self.towers for p in tower.counted)]

    def buffers(self) -> dict[str, Tensor]:
        return super().buffers() | {n: b for tower in self.towers for n, b in tower.buffers().items()}

    def begin(self, scale: float) -> None:
        super().begin(scale)
        for tower in self.towers:
            tower.begin(scale)

    def microbatch(self, last: bool) -> None:
        super().microbatch(last)
        for tower in self.towers:
            tower.microbatch(last)

    @torch.no_grad()
    def evaluate(self, steps: Iterable[list[Batch]], loss_of: LossOf) -> Tensor:
        for tower in self.towers:
            tower.module.eval()
        out = super().evaluate(steps, loss_of)
        for tower in self.towers:
            tower.data.after_evaluation()
            tower.module.train()
        return out

    def finish(self, overlap_callback: Callable[[], None] = nothing) -> None:
        super().finish(overlap_callback)
        for tower in self.towers:
            tower.finish()

    def local_square(self) -> Tensor | None:
        """Not known: towers have other replicas."""
        super().local_square()
        for tower in self.towers:
            tower.local_square()
        return None

    def zero_grad(self) -> None:
        super().zero_grad()
        for tower in self.towers:
            tower.zero_grad()

    def after_step(self, taken: bool | Tensor = True) -> None:
        super().after_step(taken)
        for tower in self.towers:
            tower.after_step(taken)

    def refresh(self) -> None:
        super().refresh()
        for tower in self.towers:
            tower.refresh()
