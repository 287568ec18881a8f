"""`comm.allreduce`: every algorithm gives the same run as one process; unsupported choices are refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from helpers import on_ranks, parity

from weft.job import parse_job
from weft.job.errors import JobError
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.verify.prove import with_layout

SMALL = "comm.bucket_mb=0.004"  # several buckets under way at once


@pytest.fixture(scope="module")
def reference(pool: RankPool) -> parity.Run:
    return parity.run(pool, parity.make_job(SMALL), "1")


@pytest.mark.parametrize(("by", "world"), [("native", 4), ("ring", 3), ("ring", 4), ("tree", 4), ("hierarchical", 2)])
def test_replicas_are_the_same_run(pool: RankPool, reference: parity.Run, by: str, world: int) -> None:
    job = parity.make_job(SMALL, f"comm.allreduce={by}", "train.accumulation=auto")
    if world == 3:
        job = parity.make_job(SMALL, f"comm.allreduce={by}", "train.global_batch=6", "train.accumulation=1")
        reference = parity.run(pool, job, "1")
    run = parity.run(pool, job, f"dp_replicate={world}", 2, None, True)
    assert not parity.differences(reference, run)
    assert all(bool(step["send"] or step["recv"]) == (by != "native") for one in run.seen for step in one.collectives)


def test_hierarchical_sum_over_two_nodes(pool: RankPool, reference: parity.Run) -> None:
    """Two nodes of two ranks each, also with tp, whose neighbours are not neighbours of the sum."""
    for layout, nodes in (
        ({"dp_replicate": 4}, 2),
        ({"dp_replicate": 2, "tp": 2}, 1),
        ({"dp_replicate": 2, "cp": 2}, 2),
    ):
        raw = with_layout(parity.make_job(SMALL, "comm.allreduce=hierarchical", "train.accumulation=auto"), layout)
        job = parse_job({**raw.model_dump(mode="json"), "cluster": {"device": "cpu", "nodes": nodes,
                                                                    "devices_per_node": 4 // nodes}})  # fmt: skip
        planned = make_plan(job)
        assert planned[1].nodes == nodes
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.pt"
            seen = pool.run(on_ranks.observe, 4, planned, 2, str(file))
            run = parity.Run(torch.load(file, weights_only=False), seen)
        assert not parity.differences(reference, run), layout


def test_refused_with_shards() -> None:
    job = parse_job({
        "model": {"shape": "tiny"}, "comm": {"allreduce": "ring"}, "train": {"global_batch": 8},
        "cluster": {"device": "cpu", "devices_per_node": 2}, "parallel": {"dp_shard": 2},
    })  # fmt: skip
    with pytest.raises(JobError) as result:
        make_plan(job)
    assert str(result.value) == (
        "comm.allreduce=ring is how replicas sum their gradients, and under parallel.dp_shard=2 the backend sums them; "
        "allreduce=auto or dp_replicate would work"
    )


def test_search_uses_replicas_only() -> None:
    job = parse_job({
        "model": {"shape": "llama-1b"}, "comm": {"allreduce": "ring"}, "train": {"global_batch": 16},
        "cluster": {"device": "h100-sxm", "nodes": 2, "devices_per_node": 4, "network": "ib-ndr"},
    })  # fmt: skip
    plan = make_plan(job)[1]
    assert (plan.dp_shard, plan.allreduce, plan.world) == (1, "ring", 8)


def test_search_chooses_nothing_that_compression_refuses() -> None:
    job = parse_job({
        "model": {"shape": "mixtral-8x7b"}, "comm": {"allreduce": "ring", "compression": "fp16"},
        "cluster": {"device": "h200", "nodes": 2, "devices_per_node": 8, "network": "ib-ndr"},
        "train": {"global_batch": 64},
    })  # fmt: skip
    plan = make_plan(job)[1]
    assert (plan.dp_shard, plan.ep, plan.world) == (1, 1, 16)


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(JobError, match="allreduce"):
        parity.make_job("comm.allreduce=rign")
