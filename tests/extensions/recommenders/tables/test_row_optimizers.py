"""Row optimizers compute what torch's do, and skip a step that is not taken."""

from __future__ import annotations

import pytest
import torch

from weft.extensions.recommenders.tables.row_optimizers import ROW_OPTIMIZERS, RowUpdate, update_rows

SETTINGS = {"eps": 1e-8, "betas": (0.9, 0.999)}


def stored(name: str, rows: int, width: int) -> dict[str, torch.Tensor]:
    optimizer = ROW_OPTIMIZERS[name]
    values = {"weight": torch.linspace(-1, 1, rows * width).view(rows, width)}
    values |= {key: torch.zeros(rows, width) for key in optimizer.full}
    return values | {key: torch.zeros(rows) for key in optimizer.per_row}


def step(
    name: str, values: dict[str, torch.Tensor], at: list[int], grad: torch.Tensor, number: int, **more: bool
) -> None:
    taken = torch.tensor(more["taken"]) if more else None
    update = RowUpdate(
        values, torch.tensor(at), grad, lambda x: x.square().mean(-1), 0.1, torch.tensor([float(number)]), SETTINGS
    )
    update_rows(ROW_OPTIMIZERS[name], update, taken)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_agrees_with_torch(name: str) -> None:
    values = stored(name, 6, 3)
    table = torch.nn.Embedding(6, 3, sparse=True)
    table.weight.data.copy_(values["weight"])
    make = {"adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}[name]
    theirs = make(table.parameters(), lr=0.1)  # type: ignore[arg-type]
    for number, at in enumerate(([1, 4], [0, 4], [4])):
        grad = torch.randn(len(at), 3, generator=torch.Generator().manual_seed(number))
        table.weight.grad = torch.sparse_coo_tensor(torch.tensor([at]), grad, (6, 3), check_invariants=True)
        theirs.step()
        step(name, values, at, grad, number + 1)
    torch.testing.assert_close(values["weight"], table.weight.detach())


def test_adagrad_divides_by_the_root_of_the_mean_squares_of_a_row() -> None:
    values, grad = stored("adagrad", 4, 2), torch.tensor([[3.0, 4.0]])
    before = values["weight"][2].clone()
    step("adagrad", values, [2], grad, 1)
    step("adagrad", values, [2], grad, 2)
    assert values["row_sum"].tolist() == [0, 0, 25, 0]
    torch.testing.assert_close(values["weight"][2], before - 0.1 * grad[0] * (12.5**-0.5 + 25**-0.5))


@pytest.mark.parametrize("name", list(ROW_OPTIMIZERS))
def test_a_step_that_is_not_taken_changes_nothing(name: str) -> None:
    values = stored(name, 4, 2)
    before = {key: value.clone() for key, value in values.items()}
    step(name, values, [1, 3], torch.full((2, 2), float("nan")), 1, taken=False)
    assert all(torch.equal(values[key], before[key]) for key in values)
