"""Every codec is unbiased or has error feedback; none overflows or hides values that are not finite."""

from __future__ import annotations

import pytest
import torch
from helpers import compression_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.comm.compression.codec_base import Codec, RoundingNoise
from weft.comm.compression.codecs import codecs_of
from weft.comm.compression.sparse_codec import Largest
from weft.job.compression import parse_compression
from weft.launch.rank_pool import RankPool
from weft.planner.time.allreduce_messages import sent_of

ALL = ["fp16", "bf16", "int8", "int4", "topk:0.1", "threshold:1.5", "onebit"]
UNBIASED = {"fp16": 2**-10, "bf16": 2**-7, "int8": 1 / 127, "int4": 1 / 7}
"""The step of each, as a share of the largest number of a block."""
WITH_FEEDBACK = [name for name in ALL if name not in ("fp16", "bf16", "int8")]


def codec(name: str) -> Codec:
    found = codecs_of(parse_compression(name)).gradients
    assert found is not None
    return found


def draw(seed: int, rows: int, n: int, size: float) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * size


def alone(counts: list[int]) -> list[int]:
    return counts


sizes = st.sampled_from([1e-12, 1e-3, 1.0, 1e20])
several = given(seed=st.integers(0, 999), rows=st.integers(1, 3), n=st.integers(1, 700), size=sizes)


@pytest.mark.parametrize("name", ALL)
@several
@settings(max_examples=15, deadline=None)
def test_round_trip_error_and_size(name: str, seed: int, rows: int, n: int, size: float) -> None:
    x, c = draw(seed, rows, n, size), codec(name)
    payload = c.encode(x, RoundingNoise(seed, x.device), alone)
    back = c.decode(payload, n)
    assert payload.dtype == torch.uint8 and back.shape == x.shape and back.dtype == torch.float32
    if "threshold" not in name:
        assert payload.shape == (rows, c.bytes_of(n))
    assert (back - x).norm() <= x.norm() * (1 + 1e-5)
    if name in UNBIASED:
        assert bool(((back - x).abs().amax(1) <= 1.01 * UNBIASED[name] * x.abs().amax(1)).all())
    assert torch.allclose(c.sum_of(payload, n), back.sum(0), rtol=1e-5, atol=1e-5 * float(x.abs().max()))


@pytest.mark.parametrize("name", UNBIASED)
@given(seed=st.integers(0, 999), size=st.sampled_from([1e-6, 1.0, 1e6]))
@settings(max_examples=5, deadline=None)
def test_rounding_is_unbiased(name: str, seed: int, size: float) -> None:
    x, c, rounds = draw(seed, 1, 40, size), codec(name), 200
    rounding = RoundingNoise(seed, x.device)
    mean = torch.stack([c.decode(c.encode(x, rounding, alone), 40) for _ in range(rounds)]).double().mean(0)
    # a rounded number is at most half a step, and a mean of so many a twentieth of that, from where it should be
    assert float((mean - x).abs().max()) <= 5 * 0.5 / rounds**0.5 * UNBIASED[name] * float(x.abs().max())


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@given(seed=st.integers(0, 999), n=st.integers(20, 600))
@settings(max_examples=6, deadline=None)
def test_error_feedback_converges(name: str, seed: int, n: int) -> None:
    c, rounding = codec(name), RoundingNoise(seed, torch.device("cpu"))
    steady, residual = draw(seed, 1, n, 1.0), torch.zeros(1, n)
    sent, wanted = torch.zeros(1, n), torch.zeros(1, n)
    for step in range(60):
        g = steady + draw(step, 1, n, 0.3)
        x = g + residual
        got = c.decode(c.encode(x, rounding, alone), n)
        residual = x - got
        sent, wanted = sent + got, wanted + g
    assert torch.allclose(sent + residual, wanted, atol=1e-2)
    assert residual.norm() < 30 * steady.norm()  # it does not grow with the steps
    assert (sent - wanted).norm() < 0.5 * wanted.norm()


@pytest.mark.parametrize("name", ALL)
def test_extremes(name: str) -> None:
    c, rounding = codec(name), RoundingNoise(0, torch.device("cpu"))
    for bad in (float("inf"), float("-inf"), float("nan")):
        x = draw(1, 2, 900, 1.0)
        x[1, 7] = bad
        back = c.decode(c.encode(x, rounding, alone), 900)
        assert bool(torch.isfinite(back[0]).all()) and not bool(torch.isfinite(back[1]).all())
    assert c.decode(c.encode(torch.zeros(2, 300), rounding, alone), 300).count_nonzero() == 0
    large = torch.full((4, 300), 3e37)  # fp16 ends at 65504; four of these still fit into fp32
    assert torch.allclose(c.sum_of(c.encode(large, rounding, alone), 300).max(), torch.tensor(1.2e38), rtol=0.02)


def test_topk_selects_the_largest() -> None:
    for seed, x in enumerate([draw(5, 2, 70_000, 1.0), torch.ones(1, 70_000), draw(6, 1, 70_000, 1.0).pow(5)]):
        back = codec("topk:0.01").decode(codec("topk:0.01").encode(x, RoundingNoise(seed, x.device), alone), 70_000)
        for row, got in zip(x, back, strict=True):
            assert int(got.count_nonzero()) == 700
            assert float(row[got != 0].abs().min()) >= float(row[got == 0].abs().max())


def test_topk_within_each_part() -> None:
    x = torch.cat([draw(7, 2, 1000, 1e-4), draw(8, 2, 500, 10.0)], 1)
    for one, least in ((Largest(share=0.01, parts=(1000, 500)), (10, 5)), (Largest(0.0, 2.0, (1000, 500)), (5, 5))):
        back = one.decode(one.encode(x, None, alone), 1500)
        assert all(int(row[:1000].count_nonzero()) >= least[0] for row in back)
        assert all(int(row[1000:].count_nonzero()) >= least[1] for row in back)
    assert Largest(share=0.01, parts=(1000, 500)).bytes_of(1500) == 6 * 15


def test_rounding_to_nearest_is_deterministic() -> None:
    weights = codecs_of(parse_compression("topk")).weights
    assert weights is not None
    x = draw(3, 1, 5000, 1.0)
    once = weights.decode(weights.encode(x, None, alone), 5000)
    assert torch.equal(once, weights.decode(weights.encode(x, None, alone), 5000))
    assert float((once - x).abs().max()) <= 0.51 / 127 * float(x.abs().max())


def test_sums_over_four_ranks(pool: RankPool) -> None:
    """All ranks end with the same bits, close to the sum; residuals add up, and the bytes are those of the codec."""
    ranks, n = 4, 515
    output = pool.run(compression_ranks.sums, ranks, ALL, n)
    inputs = torch.stack([compression_ranks.numbers(r, ranks, n) for r in range(ranks)])  # [rank, row, n]
    for name in ALL:
        seen = [one[name] for one in output]
        totals = [one["reduced"][0] for one in seen]
        assert all(torch.equal(totals[0], t) for t in totals), name
        if codec(name).feedback:
            residual = sum(one["reduced"][1] for one in seen)
            assert torch.allclose(totals[0] + residual, inputs.sum(0).flatten(), atol=1e-4), name
            missing = sum(one["scattered"][1] for one in seen)
            whole = torch.stack([one["scattered"][0] for one in seen]) + missing
            assert torch.allclose(whole, inputs.sum(0), atol=1e-4), name
            assert all(torch.allclose(one["gathered"][0][r] + one["gathered"][1], inputs[r, 0], atol=1e-5)
                       for r, one in enumerate(seen)), name  # fmt: skip
        else:
            assert (totals[0] - inputs.sum(0).flatten()).norm() < 0.02 * inputs.sum(0).norm(), name
        if "threshold" not in name:
            row = codec(name).bytes_of(n)
            assert all(one["counted"]["all_to_all"].bytes == (ranks - 1) * row for one in seen), name
            both = seen[0]["both"]
            if codec(name).sparse:
                assert {k: t.bytes for k, t in both.items()} == {"all_gather": codec(name).bytes_of(ranks * n)}
            else:
                assert {k: t.bytes for k, t in both.items()} == {"all_to_all": (ranks - 1) * row, "all_gather": row}


@pytest.mark.parametrize(("ranks", "near"), [(3, 2), (4, 2)])
def test_sums_by_encoded_messages(pool: RankPool, ranks: int, near: int) -> None:
    """Ring, tree and two levels: equal bits on all ranks, near the sum, residuals that add up, and the stated bytes."""
    settings, counts = ["fp16", "int8", "int4"], [1, 515, 40960]
    output = pool.run(compression_ranks.message_sums, ranks, settings, counts, near)
    for case in output[0]:
        name, algorithm, n = case.split()
        totals, missing, sent = zip(*(one[case] for one in output), strict=True)
        assert all(torch.equal(totals[0], t) for t in totals), case
        wanted = torch.stack([compression_ranks.numbers(r, 1, int(n))[0] for r in range(ranks)]).sum(0)
        if codec(name).feedback:
            assert torch.allclose(totals[0] + sum(missing), wanted, atol=1e-4), case
        else:
            assert (totals[0] - wanted).norm() < 0.02 * ranks * wanted.norm(), case
        if n == "40960":  # every shard is a multiple of the blocks
            size = codec(name).bytes_of(40960)
            times = [sent_of(algorithm, ranks, r, near) for r in range(ranks)]
            assert ranks == 3 or list(sent) == [round(size * t) for t in times], case
            assert all(abs(s - size * t) < 0.02 * size for s, t in zip(sent, times, strict=True)), case
