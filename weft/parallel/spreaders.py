"""What spreads parts of a model in a way of its own. Extensions register it; `parallelize` asks each entry once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weft.job.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from weft.planner.plan import Plan


class SeparateParameters(Protocol):
    """Parameters outside the model's own, with gradients, updates and checkpoint tensors of their own."""

    def zero_grad(self) -> None: ...

    def finish(self) -> None:
        """Sum the gradients after the last backward pass of a step."""

    def squares(self) -> Tensor:
        """The sum of squares of the gradients that this rank adds to the norm."""

    def update(self, lr: float, factor: Tensor, taken: Tensor | None) -> None:
        """Update by gradients · factor; `taken` is 0 where the step is skipped."""

    def weights(self) -> dict[str, Tensor]:
        """By name, the weights of which this rank holds a part."""

    def state(self) -> dict[str, Tensor]:
        """The optimizer's states, as NAME.KEY."""

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients, to compare layouts."""


@dataclass(frozen=True)
class Spreader:
    """Spreads a kind of model or a part of it. Functions are named as `module:function`."""

    name: str
    wanted: Callable[[nn.Module, Plan], bool]
    """Whether a model or its plan has such parts."""
    take_out: str = ""
    """From (model, mesh, plan, seed) to SeparateParameters, which it takes out of the model; None if there are none."""
    spread: str = ""
    """From (model, mesh, plan, seed, whether sums are needed) to the SpreadModel of a run without a pipeline."""


SPREADERS: Registry[Spreader] = Registry("spreader", __name__)
