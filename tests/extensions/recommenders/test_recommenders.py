"""Recommenders: lookups of jagged ids, candidates, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.data.loader import padded_ids
from weft.extensions.recommenders.models.initial_rows import initial_rows, table_key
from weft.extensions.recommenders.models.tables import EmbeddingTables
from weft.job import JobError, parse_job
from weft.job.shapes import resolve
from weft.models.build_model import build_model
from weft.models.user.eval_metrics import METRICS


def make(**model: Any) -> nn.Module:
    tables = [{"name": "user", "rows": 5}, {"name": "item", "rows": 7, "pooling": "none", "tower": "item"}]
    job = {"model": {"dim": 4, "tables": tables, **model}, "data": {"source": "synthetic"}}
    module = build_model(resolve(parse_job(job)).model)
    for part in module.modules():
        if isinstance(part, EmbeddingTables):
            for spec in part.specs:
                setattr(part, spec.weight, nn.Parameter(torch.randn(spec.rows, spec.dim)))
    return module


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_agree_with_torch(pooling: str) -> None:
    spec = {"name": "a", "rows": 6, "dim": 3, "pooling": pooling, "features": ["a"], "init": 1.0}
    tables = EmbeddingTables([spec])
    weight = torch.randn(6, 3)
    tables.a_weight = nn.Parameter(weight)
    found = tables({"a": torch.tensor([[1, 2, -1], [-1, -1, -1], [5, 5, 0]])})["a"]
    bags = torch.nn.functional.embedding_bag(
        torch.tensor([1, 2, 5, 5, 0]), weight, torch.tensor([0, 2, 2]), mode=pooling
    )
    torch.testing.assert_close(found.detach(), bags)


@pytest.mark.parametrize("family", ["dlrm", "two_tower"])
def test_candidates_have_the_scores_of_single_samples(family: str) -> None:
    module = make(family=family, dense_features=2)
    dense, users, items = torch.randn(3, 2), torch.tensor([0, 4, 1]), torch.tensor([[1, 2], [6, 0], [3, 3]])
    scores = module(dense=dense, user=users, item=items)
    assert scores.shape == (3, 2)
    for i in range(2):
        torch.testing.assert_close(module(dense=dense, user=users, item=items[:, i]), scores[:, i])


def test_initial_rows_do_not_depend_on_the_part() -> None:
    def rows(seed: int, first: int, end: int, left: int = 0, right: int = 8) -> Tensor:
        numbers = torch.arange(first, end)
        keys = torch.full_like(numbers, table_key(seed, "user"))
        return initial_rows(keys, numbers, torch.full((end - first,), 0.5), 8, left, right)

    whole = rows(3, 0, 50)
    assert torch.equal(rows(3, 20, 30, 2, 5), whole[20:30, 2:5])
    assert whole.abs().max() <= 0.5 and abs(float(whole.mean())) < 0.05 and float(whole.std()) > 0.25
    assert not torch.equal(rows(4, 0, 50), whole)


def test_ids_of_several_lengths_are_padded() -> None:
    arrays = [torch.tensor(x).numpy() for x in ([1], [2, 3, 4])]
    assert [a.tolist() for a in padded_ids("inputs/genres", arrays)] == [[1, -1, -1], [2, 3, 4]]
    assert padded_ids("targets", arrays) == arrays


def test_hit_rate_counts_ties_as_misses() -> None:
    scores = torch.arange(20.0).repeat(3, 1)
    labels = torch.zeros(3, 20)
    labels[0, 10] = labels[1, 9] = labels[2, 19] = 1
    mask = torch.ones(3, 20, dtype=torch.bool)
    assert METRICS["hit_rate"].sums(scores, labels, mask).tolist() == [2, 3]
    assert METRICS["hit_rate"].sums(scores, labels.argmax(-1), mask[:, 0]).tolist() == [2, 3]
    assert METRICS["hit_rate"].sums(torch.zeros(3, 20), labels, mask).tolist() == [0, 3]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"family": "dlrm", "tables": []}, "model.tables is missing; give it, such as tables: "),
        ({"family": "llama"}, "model.tables has no effect without model.family=dlrm or two_tower; leave it out"),
        ({"family": "dlrm", "tables": [{"name": "a", "rows": 3, "dim": 5}]}, "a has dim=5, and dlrm multiplies rows"),
        ({"family": "two_tower", "tables": [{"name": "a", "rows": 3}]}, "has no table of the tower item"),
        ({"family": "dlrm", "tables": [{"name": "a", "rows": 3}] * 2}, "must not name 'a' twice"),
        ({"family": "dlrm", "tables": [{"name": "dense", "rows": 3}]}, "must not name a feature dense"),
        (
            {"family": "dlrm", "tables": [{"name": "a", "rows": 3, "sprad": "row"}]},
            "did you mean model.tables.0.spread",
        ),
    ],
)
def test_wrong_tables_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        make(**model)


def test_samples_that_do_not_fit_are_refused() -> None:
    module = make(family="dlrm", dense_features=2)
    users, items = torch.tensor([0]), torch.tensor([1])
    with pytest.raises(JobError, match=r"model.dense_features=2, and the samples have 3 numbers in dense"):
        module(dense=torch.zeros(1, 3), user=users, item=items)
    with pytest.raises(JobError, match=r"model.tables looks up 'item'; add it to the samples"):
        module(dense=torch.zeros(1, 2), user=users)
    with pytest.raises(JobError, match=r"the table item has rows=7, and a sample has the id 9; rows=10 would work"):
        module(dense=torch.zeros(1, 2), user=users, item=items + 8)
