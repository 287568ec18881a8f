"""Optimizers, averages, clipping, loss scale and number of collectives in every layout."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.parity import ONE_PASS, check, disagreements, make_job, run

from weft.launch.rank_pool import RankPool

CUT = ("dp_shard 2 zero=2", "dp_shard 2 zero=3 × tp 2")


STAGES = {"lars": ("pp 2 × tp 2",), "lamb": ("pp 2 × dp_shard 2 zero=1",)}
"""Layouts of one optimizer only."""


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon", "lars", "lamb"])
def test_every_optimizer_on_sharded_weights(pool: RankPool, name: str) -> None:
    """51 rows over 2 × 2 ranks give uneven shards twice; averages are compared like weights."""
    job = make_job(
        f"optim.name={name}", "model.vocab=51", "model.kv_heads=2", "model.bias=true", "train.ema=0.9",
        "train.accumulation=1",
    )  # fmt: skip
    reference = run(pool, job, "1")
    check(pool, job, (*CUT, *STAGES.get(name, ())), 2, reference)
    assert reference.result.ema.keys() == reference.result.trace.parameters.keys()


def test_clipping(pool: RankPool) -> None:
    """With sgd the length of a step equals the clip, in every layout."""
    plain = ("optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.lr=1", "optim.clip=0.01")
    job = make_job(*plain)
    for layout in ("1", "dp_replicate 2", "dp_shard 2 zero=3 × tp 2", "tp 2 no-sequence"):
        result = run(pool, job, layout, 1).result
        way = torch.stack([(w - result.trace.start[n]).norm() for n, w in result.trace.parameters.items()]).norm()
        assert result.trace.norms[0] > 0.1, layout
        assert float(way) == pytest.approx(0.01, rel=1e-4), layout


def test_a_loss_scale_that_is_too_large_skips_and_recovers(pool: RankPool) -> None:
    """Every rank of every layout takes and skips the same steps, and a skipped step changes nothing."""
    job = make_job("precision=fp16", "train.ema=0.5")
    reference = run(pool, job, "1", 5, 2.0**21).seen[0]
    assert reference.taken == [False, False, True, True, False]
    assert reference.scales == [2.0**21, 2.0**20, 2.0**19, 2.0**19, 2.0**20]
    for layout in ("dp_replicate 2", "dp_shard 2 zero=3 × tp 2"):
        spread = run(pool, job, layout, 5, 2.0**21)
        assert all((s.taken, s.scales) == (reference.taken, reference.scales) for s in spread.seen), layout
        assert not disagreements(spread.seen)
    still = run(pool, job, "dp_shard 2 zero=3 × tp 2", 2, 2.0**21).result
    assert all(torch.equal(w, still.trace.start[n]) for n, w in still.trace.parameters.items())
    assert all(torch.equal(w, still.trace.start[n]) for n, w in still.ema.items())


def test_a_gradient_that_overflows_as_a_whole_is_skipped_in_every_layout(pool: RankPool) -> None:
    """One process has the whole batch's gradient in fp16; four replicas have quarters, of which none is beyond fp16."""
    job = make_job("precision=fp16", "optim.name=sgd", "data.seq_len=32", "train.global_batch=64", ONE_PASS)
    for layout in ("1", "dp_replicate 4", "dp_shard 4 zero=1", "dp_shard 2 zero=3 × tp 2", "dp_replicate 2 × cp 2"):
        assert run(pool, job, layout, 2, 2.0**23).seen[0].taken == [False, True], layout


UNITS = 3  # two blocks and the rest of the model
COUNTS: dict[str, tuple[Counter[str], Counter[str]]] = {
    # what one microbatch a step asks for, and what four do; the sum of valid targets is one all-reduce
    "dp_replicate 2": (Counter(allreduce=2), Counter(allreduce=2)),
    "dp_shard 2 zero=1": (
        Counter(allreduce=1, allgather_base=UNITS, reduce_scatter_base=UNITS),
        Counter(allreduce=1, allgather_base=UNITS, reduce_scatter_base=UNITS),
    ),
    "dp_replicate 2 × dp_shard 2 zero=2": (
        Counter(allreduce=1 + UNITS, allgather_base=UNITS, reduce_scatter_base=UNITS),
        Counter(allreduce=1 + UNITS, allgather_base=UNITS, reduce_scatter_base=4 * UNITS),
    ),
    "dp_shard 2 zero=3": (
        Counter(allreduce=1, allgather_base=2 * UNITS, reduce_scatter_base=UNITS),
        Counter(allreduce=1, allgather_base=8 * UNITS, reduce_scatter_base=4 * UNITS),
    ),
}


@pytest.mark.parametrize("layout", COUNTS)
def test_microbatches_communicate_only_when_needed(pool: RankPool, layout: str) -> None:
    for accumulation, expected in zip((1, 4), COUNTS[layout], strict=True):
        job = make_job(f"train.accumulation={accumulation}", "train.global_batch=16")
        for seen in run(pool, job, layout, 2, None, True).seen:
            assert seen.collectives == [expected, expected]
