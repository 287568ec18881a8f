"""An optimizer around another one, whose groups and state it shows as its own."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class OptimizerWrapper(Optimizer):
    """Passes everything but its steps to `optimizer`."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
