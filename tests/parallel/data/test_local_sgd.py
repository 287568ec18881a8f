"""Local SGD and DiLoCo: equal to ordinary training where they must be, and exact resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sync_ranks
from helpers.parity import make_job, section
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.parallel.data.local_sgd import CODECS
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

SGD = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "clip": 0.0}}


def job_of(layout: str, sync: Any, **sections: Any) -> Job:
    job = with_layout(make_job(**sections), section(layout))
    return Job.model_validate({**job.model_dump(), "train": {**job.train.model_dump(), "sync": sync}})


def train(pool: RankPool, layout: str, sync: Any, last: int, *args: Any, **sections: Any) -> list[Any]:
    planned = make_plan(job_of(layout, sync, **sections))
    return pool.run(sync_ranks.train_to, ranks(section(layout)), planned, last, *args)


def weights(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for n, t in sorted(state.items()) if n.startswith("model.")])


def near(one: Tensor, other: Tensor, start: Tensor) -> bool:
    """Whether two runs ended with the same weights, relative to their updates."""
    return bool((one - other).norm() <= 1e-4 * (one - start).norm())


def test_local_sgd_of_one_step_is_ordinary_training(pool: RankPool, documents: Path) -> None:
    """Also where replicas have different counts of valid targets: their weights are averaged by them."""
    data = {"data": {"source": str(documents), "mask_documents": True}, "model": {"vocab": 257}}
    plain = weights(train(pool, "1", "step", 3, **SGD, **data)[0][0])
    start = weights(train(pool, "1", "step", 0, **SGD, **data)[0][0])
    for layout in ("dp_replicate 2 x dp_shard 2", "dp_replicate 2 x pp 2"):
        assert near(weights(train(pool, layout, "local:1", 3, **SGD, **data)[0][0]), plain, start), layout


def test_diloco_with_a_plain_outer_step_is_averaging(pool: RankPool) -> None:
    start = weights(train(pool, "1", "step", 0)[0][0])
    averaged = train(pool, "dp_replicate 2", "local:2", 5)
    outer = {"mode": "diloco", "every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    stepped = train(pool, "dp_replicate 2", outer, 5)
    assert near(weights(stepped[0][0]), weights(averaged[0][0]), start)
    assert not near(weights(stepped[0][0]), weights(stepped[1][0]), start)  # step 5 was taken alone
    size = start.numel() * 4
    assert [round(b / size, 2) for b in averaged[0][1]] == [0, 1, 0, 1, 0]
    coarse = train(pool, "dp_replicate 2", {**outer, "quantize": "int8"}, 10)  # 10 is the job's last step
    assert torch.equal(weights(coarse[0][0]), weights(coarse[1][0]))
    assert max(coarse[0][1]) < 0.65 * size  # a quarter, twice, and the padding of so small a model


def test_exact_resume_in_the_middle_of_a_round(pool: RankPool, tmp_path: Path) -> None:
    sync = {"mode": "diloco", "every": 2, "quantize": "int4"}
    args = {"train": {"ema": 0.9, "accumulation": 1}}
    whole = train(pool, "dp_replicate 2 x dp_shard 2", sync, 5, **args)
    train(pool, "dp_replicate 2 x dp_shard 2", sync, 3, str(tmp_path), [3], **args)
    again = train(pool, "dp_replicate 2 x dp_shard 2", sync, 5, str(tmp_path), [5], **args)
    for (before, _), (after, _) in zip(whole, again, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) for n in before)


def test_any_layout_resumes_from_the_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    """In the middle of a round it holds the mean of the replicas, whatever layout or sync reads it."""
    sync = {"mode": "diloco", "every": 4}
    left = train(pool, "dp_replicate 2", sync, 6, str(tmp_path), [6])
    mean = (weights(left[0][0]) + weights(left[1][0])) / 2
    for layout, other in (("1", "step"), ("dp_shard 2", "step"), ("dp_replicate 4", sync), ("tp 2", "step")):
        opened = train(pool, layout, other, 6, str(tmp_path))
        assert torch.allclose(weights(opened[0][0]), mean, atol=1e-6), layout
        assert torch.equal(weights(opened[0][0]), weights(opened[-1][0]))
    trained = train(pool, "dp_replicate 4", sync, 10, str(tmp_path))
    assert torch.equal(weights(trained[0][0]), weights(trained[3][0]))
    train(pool, "1", "step", 7, str(tmp_path), [7])
    begun = train(pool, "dp_replicate 2", sync, 10, str(tmp_path))
    assert torch.equal(weights(begun[0][0]), weights(begun[1][0]))


def test_guards_accept_differing_replicas(pool: RankPool) -> None:
    """Between exchanges weights differ, as with corrupted memory."""
    alike = pool.run(sync_ranks.watched, 4, make_plan(job_of("dp_replicate 2 x tp 2", "diloco")))[0]
    assert alike[()] == [(0, 1), (2, 3)] and not alike["tp",]
    alike = pool.run(sync_ranks.watched, 4, make_plan(job_of("dp_replicate 2 x tp 2", "step")))[0]
    assert alike[()] == [(0, 1, 2, 3)] and alike["tp",] == [(0, 2), (1, 3)]


@given(st.integers(1, 4), st.sampled_from(["int8", "int4"]), st.integers(0, 2**31), st.floats(1e-20, 1e20))
@settings(max_examples=30, deadline=None)
def test_quantized_values_are_within_half_a_level(blocks: int, kind: str, seed: int, size: float) -> None:
    codec = CODECS[kind]
    n, levels = blocks * codec.block, 2 ** (codec.bits - 1) - 1
    values = torch.randn(1, n, generator=torch.Generator().manual_seed(seed)) * size
    values[:, : codec.block] = 0
    sent = codec.encode(values, None, list)
    level = values.view(-1, codec.block).abs().amax(1, keepdim=True) / levels
    assert ((codec.decode(sent, n) - values).view(-1, codec.block).abs() <= level * 0.501).all()
    assert sent.numel() == codec.bytes_of(n) == blocks * (codec.block * codec.bits // 8 + 4)


@pytest.mark.parametrize(("world", "size"), [(2, 1), (3, 5000)])
def test_quantized_sums_are_equal_on_every_rank(pool: RankPool, world: int, size: int) -> None:
    found = pool.run(sync_ranks.quantized_sums, world, size, "int8")
    for output, exact, _ in found:
        assert torch.equal(output, found[0][0])
        assert (output - exact).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.parametrize(
    ("layout", "sync", "sections", "result"),
    [
        ("dp_shard 2", "local:8", {}, "train.sync=local is an exchange between replicas, and there is one"),
        ("1", "diloco", {}, "2 ranks (--nproc 2) with parallel.dp_replicate=2 or train.sync=step would work"),
        ("dp_replicate 2", "local:8", {"precision": "fp16"}, "precision=bf16 would work"),
        ("dp_shard 2", "server:sync", {}, "parallel.dp_replicate=-1 would work"),
        (
            "dp_replicate 2",
            {"mode": "federated", "sampled": 3},
            {},
            "global_batch=8 is not a multiple of the 3 clients",
        ),
        ("dp_replicate 4", {"mode": "server", "gather": 3}, {}, "gather=2 would work"),
    ],
)
def test_unsupported_combinations_are_refused(layout: str, sync: Any, sections: Any, result: str) -> None:
    with pytest.raises(JobError) as refused:
        make_plan(job_of(layout, sync, **sections))
    assert result in str(refused.value)


def test_auto_layout_uses_replicas() -> None:
    job = Job.model_validate({"cluster": {"device": "cpu"}, "train": {"sync": "diloco:20"}})
    plan = make_plan(job, 2)[1]
    assert (plan.dp_replicate, plan.dp_shard, plan.sync, plan.sync_every) == (2, 1, "diloco", 20)
    every_step = make_plan(Job.model_validate({"cluster": {"device": "cpu"}, "parallel": {"dp_replicate": 2}}), 2)[1]
    assert plan.predicted["communication_mib"] < every_step.predicted["communication_mib"] / 15
    assert plan.layout() == "dp_replicate 2, diloco every 20"
