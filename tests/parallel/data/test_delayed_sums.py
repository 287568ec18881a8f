"""train.sync=predict: the stated updates, equal replicas, exact resuming, and checkpoints that any run opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sync_ranks
from helpers.parity import make_job, section
from torch import Tensor

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

SGD = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "clip": 0.0, "weight_decay": 0.0}}


def job_of(layout: str, sync: str, *overrides: str, **sections: Any) -> Job:
    job = with_layout(make_job("comm.bucket_mb=0.004", *overrides, **sections), section(layout))
    return Job.model_validate({**job.model_dump(), "train": {**job.train.model_dump(), "sync": sync}})


def train(pool: RankPool, layout: str, sync: str, last: int, *args: Any, **sections: Any) -> list[dict[str, Tensor]]:
    planned = make_plan(job_of(layout, sync, **sections))
    return [one[0] for one in pool.run(sync_ranks.train_to, ranks(section(layout)), planned, last, *args)]


def weights(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for n, t in sorted(state.items()) if n.startswith("model.")])


def test_updates_are_those_stated(pool: RankPool) -> None:
    """Four replicas, and a run by hand on one process with the same extrapolation and correction."""
    true, used = pool.run(sync_ranks.predicted_by_hand, 1, make_plan(job_of("1", "step", **SGD)), 7)[0]
    plain = weights(train(pool, "1", "step", 7, **SGD)[0])
    found = train(pool, "dp_replicate 4", "predict", 7, train={"accumulation": 1}, **SGD)
    assert all(torch.equal(weights(found[0]), weights(other)) for other in found)
    assert torch.allclose(weights(found[0]), used, atol=1e-6)
    assert not torch.allclose(true, used, atol=1e-4) and not torch.allclose(plain, true, atol=1e-5)


def test_exact_resume_and_a_checkpoint_for_any_run(pool: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": {"ema": 0.9}, "precision": "bf16"}
    whole = train(pool, "dp_replicate 2", "predict", 10, **options)
    half = train(pool, "dp_replicate 2", "predict", 6, str(tmp_path), [6], **options)
    again = train(pool, "dp_replicate 2", "predict", 10, str(tmp_path), **options)
    assert again[0].keys() == whole[0].keys()
    for before, after in zip(whole, again, strict=True):
        assert all(torch.equal(before[n], after[n]) for n in before)
    opened = train(pool, "tp 2", "step", 6, str(tmp_path), **options)
    changed = weights(opened[0]) - weights(half[0])  # the true weights, not the predicted ones
    assert 0 < changed.norm() < 0.1 * weights(half[0]).norm()


@pytest.mark.parametrize(
    ("layout", "overrides", "result"),
    [("dp_shard 2", [], "train.sync=predict is an exchange between replicas, and there is one"),
     ("dp_replicate 2 x tp 2", [], "train.sync=predict trains with whole copies of the model"),
     ("1", [], "train.sync=predict is an exchange between replicas, and there is one"),
     ("dp_replicate 2", ["comm.compression=int8"], "comm.compression=int8 is summed within a step"),
     ("dp_replicate 2", ["comm.allreduce=ring"], "comm.allreduce=ring passes messages on only while a rank waits"),
     ("dp_replicate 2", ["precision=fp16"], "precision=fp16 scales the loss"),
     ("dp_replicate 2", ["memory.offload=states"], "memory.offload=states updates weights in the next forward pass")],
)  # fmt: skip
def test_refusals(layout: str, overrides: list[str], result: str) -> None:
    with pytest.raises(JobError) as error:
        make_plan(job_of(layout, "predict", *overrides))
    assert str(error.value).startswith(result)


def test_plan_counts_copies_and_hides_the_sum() -> None:
    raw = {
        "model": {"shape": "llama-1b"}, "train": {"global_batch": 16},
        "cluster": {"device": "h100-sxm", "nodes": 8, "devices_per_node": 1, "network": "ethernet-10"},
        "parallel": {"dp_replicate": 8, "dp_shard": 1},
    }  # fmt: skip
    plain = make_plan(Job.model_validate(raw))[1]
    late = make_plan(Job.model_validate({**raw, "train": {"global_batch": 16, "sync": "predict"}}))[1]
    assert late.predicted["step_time_s"] < plain.predicted["step_time_s"]
    assert late.predicted["communication_mib"] == plain.predicted["communication_mib"]
    assert late.predicted["memory_gib"] > plain.predicted["memory_gib"] + 20
