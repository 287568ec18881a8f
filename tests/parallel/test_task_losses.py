"""Several tasks: their losses have the stated definition, and every layout trains the same run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import on_ranks
from helpers.parity import NOT_OURS, check, make_job, section
from test_user_modules import DATA

from weft.data.loader import read_share
from weft.data.open_dataset import open_dataset
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankPool
from weft.models.build_model import build_model, loss_sum
from weft.models.transformer import Transformer
from weft.models.user.task_losses import TaskLosses
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

OWN = "helpers.own_models:"
MIXTURE: list[dict[str, Any]] = [
    {"name": "kind", "source": f"{OWN}Kinds", "weight": 3, "loss": "cross_entropy"},
    {"name": "amount", "source": f"{OWN}Amounts", "loss": {"function": "mse", "output": "size", "weight": 0.25}},
]
TEXT = [{"name": "a", "source": "synthetic"}, {"name": "b", "source": "synthetic", "loss": {"weight": 3}}]


def own(mixture: list[dict[str, Any]] = MIXTURE, temperature: float | None = None, **sections: Any) -> Job:
    model = {**NOT_OURS, "module": f"{OWN}TwoHeads"}
    return make_job(model=model, data={"mixture": mixture, "temperature": temperature}, **sections)


JOBS = {
    "own module": (own(train={"metrics": ["accuracy"]}), (DATA[0], DATA[2], "pp 2 gpipe")),
    "tokens": (make_job(data={"mixture": TEXT}), ("dp_shard 2 zero=3 × tp 2", "pp 2 × cp 2")),
}
FIGURES = {
    "own module": {"val_loss", "val_loss/kind", "val_accuracy/kind", "val_loss/amount"},
    "tokens": {"val_loss", "val_loss/a", "val_loss/b"},
}


@pytest.mark.parametrize("name", JOBS)
def test_same_run_and_same_figures(pool: RankPool, name: str) -> None:
    job, layouts = JOBS[name]
    check(pool, job, layouts)
    found = [
        pool.run(on_ranks.evaluated, ranks(section(layout)), make_plan(with_layout(job, section(layout))))[0]
        for layout in ("1", layouts[0])
    ]
    assert set(found[0]) == FIGURES[name]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    if name == "own module":  # 13 held-out samples of each
        parts = found[0]["val_loss/kind"] + 0.25 * found[0]["val_loss/amount"]
        assert found[0]["val_loss"] == pytest.approx(parts / 2)


def batch_of(job: Job) -> dict[str, torch.Tensor]:
    data = open_dataset(job)
    return read_share(data, seed=0, step=0, global_batch=8, microbatch=8, dp_rank=0, dp_size=1)[0]


def test_losses_of_own_modules() -> None:
    """Each sample has the loss of its task; inputs and targets of other tasks do not matter."""
    job = resolve(own())
    batch, tasks, model = batch_of(job), TaskLosses(job, torch.device("cpu")), build_model(job.model)
    assert sorted(batch) == ["ids", "inputs/values", "inputs/words", "targets/amount", "targets/kind", "task", "valid"]
    kinds, amounts = batch["task"] == 0, batch["task"] == 1
    assert 0 < int(amounts.sum()) < int(kinds.sum()) and not batch["inputs/words"][amounts].any()
    outputs = model(batch["inputs/values"], batch["inputs/words"], batch["task"])
    one = F.cross_entropy(outputs["kind"][kinds], batch["targets/kind"][kinds], reduction="sum").detach()
    two = (outputs["size"] - batch["targets/amount"])[amounts].square().mean(1).sum().detach()
    found = loss_sum(model, batch, job.model, tasks=tasks)
    assert torch.allclose(found, one + 0.25 * two)
    assert tasks.sums.tolist() == [pytest.approx([float(one), float(two)]), [int(kinds.sum()), int(amounts.sum())]]


def test_losses_of_tokens() -> None:
    job = resolve(JOBS["tokens"][0])
    batch, tasks, model = batch_of(job), TaskLosses(job, torch.device("cpu")), build_model(job.model)
    assert isinstance(model, Transformer)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    logits = model(batch["inputs"])
    each = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none").view(8, -1).sum(1)
    ones = [each[batch["task"] == task].sum() for task in (0, 1)]
    found = loss_sum(model, batch, job.model, tasks=tasks)
    found.backward()
    assert torch.allclose(found, ones[0] + 3 * ones[1])
    assert tasks.sums[0].tolist() == pytest.approx([x.item() for x in ones])
    grad = model.head.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    (each * torch.tensor([1.0, 3.0])[batch["task"]]).sum().backward()
    assert torch.allclose(grad, model.head.weight.grad, atol=1e-6)  # type: ignore[union-attr, arg-type]
    sums = tasks.sums.clone()
    loss_sum(model, batch, job.model)
    assert torch.equal(tasks.sums, sums)


def test_temperature() -> None:
    for temperature, share in ((1, 1600 / 1664), (2, 40 / 48), (1e6, 0.5)):
        mixture = [{"source": f"{OWN}Kinds", "name": "few"}, {"source": f"{OWN}Many", "name": "many"}]
        job = resolve(own(mixture, temperature))
        found: Any = open_dataset(job)
        tasks = [int(found.train(int(i))["task"]) for i in found.sample_indices(0, np.arange(1024))]
        assert np.mean(tasks) == pytest.approx(share, abs=2e-3)
        assert f"many {share:.1%} (1,600 samples)" in found.summary and f"^(1/{temperature:g})" in found.summary


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ([MIXTURE[0], {"source": f"{OWN}Amounts"}], "another name for every source, or without names"),
        ([{"source": f"{OWN}Amounts", "loss": "mse"}], "a name for every source that has a loss"),
        ([{**MIXTURE[0], "source": f"{OWN}Tuples"}, MIXTURE[1]], "task amount names its inputs, and another does not"),
        ([MIXTURE[0], {**MIXTURE[1], "source": f"{OWN}WideValues"}], r"inputs/values is float32 of shape \[2, 2\]"),
    ],
)
def test_refused_tasks(mixture: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(JobError, match=message):
        open_dataset(resolve(own(mixture)))


def test_rules_of_tasks() -> None:
    function = make_job(data={"mixture": [{**TEXT[0], "loss": "mse"}, TEXT[1]]})
    with pytest.raises(JobError, match=r"task a sets a loss function, and model.family=llama has its own"):
        make_plan(with_layout(function, section("1")))
    several = own().model_copy(update={"model": own().model.model_copy(update={"loss": "contrastive"})})
    with pytest.raises(JobError, match=r"set the loss of each task in data\.mixture"):
        make_plan(with_layout(several, section("1")))
    with pytest.raises(JobError, match="a temperature or the weights of its mixture, not both"):
        own(temperature=2)
