"""Modules with several inputs, outputs and losses are the same run in every layout, with the same metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import on_ranks
from helpers.parity import NOT_OURS, ONE_PASS, check, differences, make_job, run, section
from test_user_modules import DATA

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.models.build_model import build_model
from weft.models.user.contrastive import contrastive_losses
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

SEVERAL = {"kind": "cross_entropy", "amount": {"function": "mse", "weight": 0.5}}


def own(module: str, source: str, loss: Any = "auto", **sections: Any) -> Job:
    model = {**NOT_OURS, "module": f"helpers.own_models:{module}", "loss": loss}
    return make_job(model=model, data={"source": f"helpers.own_models:{source}"}, **sections)


@pytest.mark.parametrize(
    ("module", "source", "loss", "layouts"),
    [
        ("TwoInputs", "Records", SEVERAL, (DATA[0], DATA[2], DATA[3])),
        ("TwoInputs", "Records", "helpers.own_models:squares", DATA[1:2]),
        ("OneOutput", "Tuples", "auto", DATA[:2]),
        ("OwnLoss", "Labelled", "model", DATA[:2]),
    ],
)
def test_same_run(pool: RankPool, module: str, source: str, loss: Any, layouts: tuple[str, ...]) -> None:
    check(pool, own(module, source, loss, train={"accumulation": 1}), layouts)


RESNET = {**NOT_OURS, "family": "resnet", "layers": 18, "vocab": 3, "args": {"width": 4, "stem": "small"}}


def test_batch_norm_over_all_replicas(pool: RankPool) -> None:
    """A ResNet whose statistics are over all replicas is the run of one process."""
    data, train = {"source": "helpers.own_models:Pictures"}, {"accumulation": 1}
    check(pool, make_job(model=RESNET, data=data, train=train), (DATA[0], DATA[2], DATA[3]))


def test_batch_norm_of_each_rank(pool: RankPool) -> None:
    """By choice ranks use their own statistics, and the run differs."""
    data, train = {"source": "helpers.own_models:Pictures"}, {"accumulation": 1}
    job = make_job(model={**RESNET, "batch_norm": "rank"}, data=data, train=train)
    found = differences(run(pool, job, "1"), run(pool, job, DATA[0]))
    assert any(what.startswith("gradient:") for what in found)


def test_mixed_images_of_a_vit(pool: RankPool) -> None:
    """Targets of mixup and CutMix are probabilities, with label smoothing, in every split of the classes."""
    model = {**NOT_OURS, "family": "vit", "dim": 16, "layers": 2, "heads": 4, "ffn": 32, "vocab": 5, "patch": 7}
    images = {"size": 14, "crop": 0.3, "autoaugment": True, "mixup": 0.8, "cutmix": 1.0}
    data = {"source": "synthetic", "seq_len": 4, "images": images}
    job = make_job(ONE_PASS, model=model, data=data, train={"label_smoothing": 0.1, "ema": 0.9})
    check(pool, job, (DATA[2], "tp 2", "cp 2 × tp 2", "pp 2 × dp_replicate 2"))


METRICS = ["accuracy", "top5", "perplexity", "helpers.own_models:margin"]


@pytest.mark.parametrize(
    ("job", "names"),
    [
        (own("OneOutput", "Tuples", train={"metrics": METRICS}), {"accuracy", "top5", "perplexity", "margin"}),
        (own("OwnLoss", "Labelled", "model"), set()),
        (
            own("TwoInputs", "Records", {"kind": "cross_entropy"}, train={"metrics": ["accuracy"]}),
            {"loss_kind", "accuracy_kind"},
        ),
    ],
)
def test_metrics_do_not_depend_on_the_layout(pool: RankPool, job: Job, names: set[str]) -> None:
    """13 samples in batches of 8: the padding of the last batch counts nothing."""
    found = {}
    for layout in ("1", "dp_replicate 2", "dp_shard 4 zero=3"):
        spread = section(layout)
        answers = pool.run(on_ranks.evaluated, ranks(spread), make_plan(with_layout(job, spread)))
        assert all(answer == answers[0] for answer in answers)
        found[layout] = answers[0]
    one = found.pop("1")
    assert set(one) == {"val_loss", *(f"val_{name}" for name in names)}
    for other in found.values():
        assert other == pytest.approx(one, rel=1e-6)
    if "val_accuracy" in one:
        assert one["val_accuracy"] * 13 == pytest.approx(round(one["val_accuracy"] * 13))
        assert one["val_top5"] == 1.0


def test_a_target_that_is_missing_is_refused(pool: RankPool) -> None:
    loss = {"kind": {"function": "cross_entropy", "target": "sort"}}
    job = with_layout(own("TwoInputs", "Labelled", loss), section("1"))
    with pytest.raises(
        Exception, match=r"model.loss.kind reads the target 'sort', and the samples have values or words"
    ):
        pool.run(on_ranks.evaluated, 1, job)


def towers(frozen: tuple[str, ...] = (), **sections: Any) -> Job:
    model = {**NOT_OURS, "module": "helpers.staged_models:TwoTowers", "loss": "contrastive", "frozen": frozen}
    data = {"source": "helpers.staged_models:Captions"}
    return make_job(model=model, data=data, train={"accumulation": 1}, **sections)


def test_a_contrastive_loss_over_all_replicas(pool: RankPool) -> None:
    """Every sample is compared with those of all ranks, and gradients are those of one process."""
    check(pool, towers(), (DATA[0], DATA[3], "pp 2 gpipe × dp_shard 2 zero=3"))
    found = [
        pool.run(on_ranks.evaluated, ranks(section(layout)), make_plan(with_layout(towers(), section(layout))))[0]
        for layout in ("1", DATA[3])
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_a_frozen_tower_is_not_trained(pool: RankPool) -> None:
    job = towers(frozen=("text", "image.0.*"))
    check(pool, job, (DATA[0], DATA[2]))
    trace = run(pool, job, DATA[0]).result.trace
    assert set(trace.parameters) == {f"image.1.{n}" for n in BLOCK_WEIGHTS} | {"scale"}
    assert {name for name in trace.moments if name.startswith("text")} == set()
    with pytest.raises(JobError, match=r"model.frozen=txt names no weight of helpers.*which has scale, text or image"):
        build_model(towers(frozen=("txt",)).model)
    with pytest.raises(JobError, match="leaves no weight"):
        build_model(towers(frozen=("*",)).model)


BLOCK_WEIGHTS = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")


def test_contrastive_losses_have_their_definition() -> None:
    a, b = torch.randn(3, 5), torch.randn(3, 5)
    valid = torch.tensor([True, True, False])
    found = contrastive_losses((a, b, torch.tensor(2.0)), valid, (), "m:M")[:2]
    near = 2 * torch.nn.functional.normalize(a[:2], dim=1) @ torch.nn.functional.normalize(b[:2], dim=1).T
    expected = -(near.log_softmax(0).diagonal() + near.log_softmax(1).diagonal()) / 2
    assert torch.allclose(found, expected, atol=1e-6)
    with pytest.raises(JobError, match=r"needs two outputs of shape \[batch, dim\], and m:M gives \[3, 5\]"):
        contrastive_losses({"one": a}, valid, (), "m:M")
