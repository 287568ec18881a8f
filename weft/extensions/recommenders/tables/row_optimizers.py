"""Optimizers of table rows. Each changes only the rows that it is given, and the states of those rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowUpdate:
    """What an optimizer is given for some rows: no row twice."""

    values: dict[str, Tensor]
    """The stored tensors: `weight` [stored, width] and the optimizer's states."""
    at: Tensor
    """Places of the rows in the stored tensors."""
    grad: Tensor
    """[rows, width]"""
    mean_square: Callable[[Tensor], Tensor]
    """The mean over a whole row of the squares of such a tensor, [rows]; columns may be on several ranks."""
    lr: float
    updates: Tensor
    """Updates of the tables so far, with this one."""
    settings: Mapping[str, Any]

    def write(self, name: str, new: Tensor, taken: Tensor | None) -> None:
        """Store new values of the rows, unless the step is not taken."""
        if taken is not None:
            new = torch.where(taken, new, self.values[name][self.at])
        self.values[name].index_copy_(0, self.at, new)


def _sgd(u: RowUpdate) -> dict[str, Tensor]:
    return {"weight": u.values["weight"][u.at] - u.lr * u.grad}


def _adagrad(u: RowUpdate) -> dict[str, Tensor]:
    total = u.values["row_sum"][u.at] + u.mean_square(u.grad)
    step = u.lr / (total.sqrt() + u.settings["eps"])
    return {"weight": u.values["weight"][u.at] - step.unsqueeze(-1) * u.grad, "row_sum": total}


def _adam(u: RowUpdate) -> dict[str, Tensor]:
    return _moments(u, u.grad.square(), "exp_avg_sq", lambda second: second)


def _rowwise_adam(u: RowUpdate) -> dict[str, Tensor]:
    return _moments(u, u.mean_square(u.grad), "row_avg_sq", lambda second: second.unsqueeze(-1))


def _moments(u: RowUpdate, square: Tensor, name: str, wide: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    first_rate, second_rate = u.settings["betas"]
    first = u.values["exp_avg"][u.at].lerp(u.grad, 1 - first_rate)
    second = u.values[name][u.at].lerp(square, 1 - second_rate)
    unbias = 1 - first_rate**u.updates, 1 - second_rate**u.updates
    step = u.lr * (first / unbias[0]) / (wide(second / unbias[1]).sqrt() + u.settings["eps"])
    return {"weight": u.values["weight"][u.at] - step, "exp_avg": first, name: second}


@dataclass(frozen=True)
class RowOptimizer:
    """An optimizer of rows: the new values of some rows, and which states it keeps."""

    apply: Callable[[RowUpdate], dict[str, Tensor]]
    full: tuple[str, ...] = ()
    """States with a value for each element."""
    per_row: tuple[str, ...] = ()
    """States with one value for each row."""


ROW_OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": RowOptimizer(_sgd),
    "adagrad": RowOptimizer(_adagrad, per_row=("row_sum",)),
    "adam": RowOptimizer(_adam, full=("exp_avg", "exp_avg_sq")),
    "rowwise_adam": RowOptimizer(_rowwise_adam, full=("exp_avg",), per_row=("row_avg_sq",)),
}
"""By the name in model.table_optim."""


def update_rows(optimizer: RowOptimizer, update: RowUpdate, taken: Tensor | None) -> None:
    """Apply one update. `taken` is a boolean on the device; if it is false nothing changes."""
    for name, new in optimizer.apply(update).items():
        update.write(name, new, taken)
