"""Experts that change ranks at a checkpoint leave the model as it was: same losses, and a more even load by rank."""

from __future__ import annotations

import expert_ranks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import make_job, section

from weft.job.errors import JobError
from weft.launch.pool import RankPool
from weft.plan import make_plan
from weft.plan.parse import ranks
from weft.train.prove import with_layout
from weft.train.rebalance import better_order, fullest


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 99), min_size=4, max_size=4))))
def test_every_expert_has_one_place(found: tuple[int, list[int]]) -> None:
    ranks, counts = found
    load = [float(c) for c in counts * ranks]
    order = better_order(load, ranks)
    assert sorted(order) == list(range(len(load)))


def test_hot_experts_part() -> None:
    load = [8.0, 8.0, 1.0, 1.0]
    order = better_order(load, 2)
    assert (fullest(load, 2), fullest([load[e] for e in order], 2)) == (16 / 9, 1.0)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_the_model_stays_the_same(pool: RankPool, optimizer: str) -> None:
    experts = {"count": 4, "top_k": 1, "ffn": 24, "balance": "bias", "bias_rate": 1e-4}
    job = make_job(f"optim.name={optimizer}", model={"experts": experts}, train={"ema": 0.5})
    for layout in ("dp_shard=4 ep=2", "tp2 ep2"):
        spread = with_layout(job, section(layout))
        still, moved = (pool.run(expert_ranks.move_experts, ranks(section(layout)), spread, m) for m in (False, True))
        assert moved[0].order is not None and moved[0].order != sorted(moved[0].order)
        torch.testing.assert_close(moved[0].losses, still[0].losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moved[0].norms, still[0].norms, rtol=1e-4, atol=1e-6)
        assert moved[0].counts == [still[0].counts[e] for e in moved[0].order]


def test_groups_are_refused() -> None:
    experts = {"count": 4, "top_k": 1, "ffn": 24, "groups": 2}
    job = make_job(model={"experts": experts}, parallel={"dp_shard": 2, "ep": 2, "ep_rebalance": 0.1})
    with pytest.raises(JobError, match=r"ep_rebalance=0\.1 gives experts other numbers"):
        make_plan(job, 2)
