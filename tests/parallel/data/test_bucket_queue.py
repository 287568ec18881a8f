"""Buckets are sent when ready, in one order on all ranks; their size balances latency and bandwidth."""

from __future__ import annotations

import pytest
from helpers import parity
from helpers.on_ranks import begin
from hypothesis import given
from hypothesis import strategies as st

from weft.hardware.catalog import find_device
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.parallel.data.buckets import PROFILED_STEP, send_order
from weft.parallel.data.data_parallel import Replicas
from weft.planner import make_plan
from weft.planner.plan import Plan
from weft.planner.time.buckets import MAX_BUCKET_MB, MIN_BUCKET_MB, all_reduce_cost, bucket_mb


def test_ready_buckets_are_sent_in_order_of_need() -> None:
    assert send_order([0, 1, 2], [1, 1, 1]) == [0, 1, 2]  # each is gone before the next is ready
    assert send_order([0, 1, 2], [5, 1, 1]) == [0, 2, 1]  # both wait behind the first: the front of the model goes on
    assert send_order([2, 1, 0], [1, 1, 1]) == [2, 1, 0]  # a model that computes in another order than it was written
    assert send_order([9, 9, 9, 0], [1, 1, 1, 1]) == [3, 2, 1, 0]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=8))
def test_every_bucket_is_sent_once_and_waits_for_no_later_one(times: list[tuple[float, float]]) -> None:
    ready, seconds = [r for r, _ in times], [s for _, s in times]
    order = send_order(ready, seconds)
    assert sorted(order) == list(range(len(times)))
    now = 0.0
    for place, chosen in enumerate(order):
        left = order[place:]
        now = max(now, min(ready[i] for i in left))
        assert ready[chosen] <= now
        now += seconds[chosen]


def orders(job: Job) -> tuple[list[int], list[int], int]:
    job, _, _, stepper, loader = begin(job)
    data = stepper.state.model.data  # type: ignore[union-attr]
    assert isinstance(data, Replicas)
    first = list(data.queue.order)
    for _, batches in zip(range(PROFILED_STEP + 2), loader, strict=False):
        stepper.update(stepper.gradients(batches), stepper.learning_rate())
    return first, data.queue.order, len(data.buckets)


def test_ranks_use_one_order(pool: RankPool) -> None:
    output = pool.run(orders, 2, parity.make_job("comm.bucket_mb=0.004", parallel={"dp_replicate": 2, "dp_shard": 1}))
    first, learned, count = output[0]
    assert count > 3
    assert first == list(range(count)) and sorted(learned) == first
    assert output[1][1] == learned


def test_bucket_size_follows_alpha_and_beta() -> None:
    cpu, gpu = find_device("cpu"), find_device("h100-sxm")
    small = parity.make_job()
    job, plan = make_plan(parity.make_job("parallel={dp_replicate: 4}"), 4)
    assert plan.bucket_mb == MIN_BUCKET_MB  # all of it in one
    assert any(reason.startswith("buckets of 1 MiB: a sum costs") for reason in plan.reasons)
    assert make_plan(parity.make_job("comm.bucket_mb=7", "parallel={dp_replicate: 4}"), 4)[1].bucket_mb == 7
    large = parity.make_job(model={"shape": "llama-1b", **dict.fromkeys(parity.BASE["model"])})
    large, _ = make_plan(large, 4)
    sizes = []
    for nodes in (1, 2):
        spread = Plan("cuda", "h100-sxm", "nccl", nodes=nodes, dp_replicate=8)
        on = large.model_copy(update={"cluster": large.cluster.model_copy(update={"nodes": nodes})})
        alpha, beta = all_reduce_cost(on, spread, gpu)
        assert alpha > 0 and beta > 0
        sizes.append(bucket_mb(on, spread, gpu)[0])
    assert all(MIN_BUCKET_MB < size <= MAX_BUCKET_MB for size in sizes)
    assert sizes[0] > sizes[1]  # over a slower link a byte costs more, and the exposed last bucket is kept small
    assert bucket_mb(job, plan, cpu)[0] == MIN_BUCKET_MB
    for wrong in ("0", "-3", "soon"):
        with pytest.raises(JobError, match=r"comm\.bucket_mb"):
            parity.make_job(f"comm.bucket_mb={wrong}")
    assert small.comm.bucket_mb == "auto"
