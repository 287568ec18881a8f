"""Metrics of evaluations agree with their definitions, whatever the split into batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from weft.job import JobError
from weft.job.schema import Model
from weft.models.user.eval_metrics import EvalMetrics, area_under_curve

MODEL = Model(module="m:M")


def evaluate(name: str, outputs: Tensor, targets: Tensor, valid: Tensor, parts: int) -> float:
    """The figure of a metric over batches of equal size."""
    metrics, total = EvalMetrics(MODEL, [name]), torch.zeros(())
    ids = torch.arange(len(outputs))
    for some in zip(*(x.chunk(parts) for x in (outputs, targets, valid, ids)), strict=True):
        batch = dict(zip(("targets", "valid", "ids"), some[1:], strict=True))
        total = total + metrics.sums({"loss": torch.tensor(0.0)}, some[0], batch)
    rows = {part: torch.cat([*held, *held]) for part, held in metrics.rows.items()}  # as two ranks of tp would give
    return metrics.figures(total.tolist(), 1.0, rows)[f"val_{name}"]


@pytest.mark.parametrize("parts", [1, 3])
def test_counts(parts: int) -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(60, 9), torch.randint(0, 9, (60,))
    valid = torch.rand(60) > 0.3
    inside, wanted = outputs[valid], targets[valid]
    hits = float((inside.argmax(1) == wanted).float().mean())
    top = float((inside.topk(5).indices == wanted[:, None]).any(1).float().mean())
    assert evaluate("accuracy", outputs, targets, valid, parts) == pytest.approx(hits)
    assert evaluate("top5", outputs, targets, valid, parts) == pytest.approx(top)


@pytest.mark.parametrize("parts", [1, 3])
def test_auc_is_the_share_of_ordered_pairs(parts: int) -> None:
    torch.manual_seed(1)
    scores, targets = torch.randint(0, 12, (60,)).float(), torch.randint(0, 2, (60,))
    valid = torch.rand(60) > 0.2
    high, low = scores[valid & (targets == 1)], scores[valid & (targets == 0)]
    pairs = (high[:, None] > low).double() + 0.5 * (high[:, None] == low).double()
    assert evaluate("auc", scores, targets, valid, parts) == pytest.approx(float(pairs.mean()))
    two = torch.stack([torch.zeros(60), scores], 1)
    assert evaluate("auc", two, targets, valid, parts) == pytest.approx(float(pairs.mean()))
    assert area_under_curve(torch.empty(0, 3)) == 0.5


def test_bleu_of_a_known_pair() -> None:
    """The example of Papineni et al.: counts of n-grams are clipped, and short texts are penalised."""
    reference = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    said = torch.tensor([[1, 2, 3, 4, 9, 6, 7]])
    matches = math.exp((math.log(6 / 7) + math.log(4 / 6) + math.log(2 / 5) + math.log(1 / 4)) / 4)
    valid = torch.ones_like(reference, dtype=torch.bool)
    assert evaluate("bleu", said, reference, valid, 1) == pytest.approx(100 * matches)
    logits = torch.nn.functional.one_hot(reference, 10).float()
    assert evaluate("bleu", logits, reference, valid, 1) == pytest.approx(100)
    with pytest.raises(JobError, match=r"bleu compares texts, .* and these are \[1\]; accuracy would work"):
        evaluate("bleu", logits[:, 0], reference[:, 0], valid[:, 0], 1)


def test_several_losses_have_the_metrics_that_fit() -> None:
    losses = {"kind": {"function": "cross_entropy"}, "seen": {"function": "bce"}, "box": {"function": "l1"}}
    metrics = EvalMetrics(Model.model_validate({"module": "m:M", "loss": losses}), ["accuracy", "top5", "auc"])
    outputs = {"kind": torch.eye(7)[:4], "seen": torch.tensor([[1.0], [-1.0], [2.0], [-2.0]]), "box": torch.zeros(4, 3)}
    batch = {
        "targets/kind": torch.arange(4), "targets/seen": (outputs["seen"] > 0).float(), "targets/box": outputs["box"],
        "valid": torch.ones(4, dtype=torch.bool), "ids": torch.arange(4),
    }  # fmt: skip
    sums = metrics.sums({name: torch.tensor(0.0) for name in ("loss", *losses)}, outputs, batch)
    assert len(sums) == metrics.size
    found = metrics.figures(sums.tolist(), 4.0, metrics.all_rows(torch.device("cpu")))
    fitting = {"val_accuracy_kind", "val_accuracy_seen", "val_top5_kind", "val_auc_seen"}
    assert {name: value for name, value in found.items() if "loss" not in name} == dict.fromkeys(fitting, 1.0)


def test_a_metric_that_does_not_fit_is_refused() -> None:
    with pytest.raises(JobError, match=r"train.metrics=top5 compares outputs \[..., classes\] with integer targets"):
        evaluate("top5", torch.zeros(4, 2), torch.zeros(4, 3), torch.ones(4, dtype=torch.bool), 1)
