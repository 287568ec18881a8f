"""Collectives composed of messages equal plain sums, with the stated bytes, for any ranks, size, shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.comm_axis import everyone
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.comm import algorithms
from weft.launch.rank_pool import RankPool

BY_HAND = [name for name in algorithms.ALGORITHMS if name != "native"]
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.complex64,
)  # fmt: skip
GLOO_SUMS = set(DTYPES) - {torch.int16}
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}


@dataclass(frozen=True)
class Case:
    algorithm: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    near: int = 1
    chunks: int | None = None
    op: str = "sum"
    turned: bool = False
    whole: bool = False
    """Numbers without fractions, which any order of addition sums exactly."""


def numbers(case: Case, rank: int) -> Tensor:
    """Other numbers on every rank, small enough for int8; as a transposed view where that is asked for."""
    shape = case.shape[::-1] if case.turned else case.shape
    random = torch.Generator().manual_seed(rank)
    made = torch.randint(-3, 4, shape, generator=random)
    x = (made.abs() if case.dtype == torch.uint8 else made).to(case.dtype)
    if case.dtype.is_floating_point and not case.whole:
        x = x + torch.rand(shape, generator=random).to(case.dtype)
    return x.permute(tuple(reversed(range(x.dim())))) if case.turned else x


def on_rank(cases: list[Case]) -> list[tuple[Tensor, int, Tensor | None]]:
    """Of each case: what this rank ends with, how many bytes it sent, and what the backend makes of it."""
    axis, found = everyone(), []
    for case in cases:
        axis.reset()
        x = numbers(case, axis.rank)
        strides = x.stride()
        op = OPS[case.op]
        out = algorithms.all_reduce(axis, x, case.algorithm, op, case.near, case.chunks)
        assert out is x and x.stride() == strides
        native = None
        if case.dtype in GLOO_SUMS and not (case.dtype.is_complex and case.op != "sum"):
            native = numbers(case, axis.rank).contiguous()
            dist.all_reduce(native, op=op)
        found.append((x.contiguous(), axis.bytes["send"], native))
    return found


def expected(case: Case, world: int) -> Tensor:
    all_of_them = torch.stack([numbers(case, r).contiguous() for r in range(world)])
    wide = all_of_them.double() if case.dtype.is_floating_point else all_of_them
    if case.op == "sum":
        return wide.sum(0).to(case.dtype)
    if case.op == "product":
        return wide.prod(0).to(case.dtype)
    return wide.amax(0).to(case.dtype) if case.op == "max" else wide.amin(0).to(case.dtype)


def check(pool: RankPool, world: int, cases: list[Case]) -> list[list[int]]:
    """Every rank has the sum, the same bits as the others; gives the bytes that each sent, by case."""
    output = pool.run(on_rank, world, cases)
    for i, case in enumerate(cases):
        first, _, native = output[0][i]
        exact = not case.dtype.is_floating_point or case.op in ("max", "min") or case.whole
        near: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
        if not exact and case.dtype in (torch.float16, torch.bfloat16):
            near = {"rtol": world * torch.finfo(case.dtype).eps, "atol": world * 8 * torch.finfo(case.dtype).eps}
        for truth in (expected(case, world), native):
            if truth is not None:
                torch.testing.assert_close(first, truth, msg=lambda text, c=case: f"{world} ranks, {c}: {text}", **near)
        for rank in output[1:]:
            assert torch.equal(rank[i][0], first), f"{world} ranks, {case}: ranks end with different bits"
    return [[rank[i][1] for rank in output] for i in range(len(cases))]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_every_algorithm_with_every_size_and_dtype(pool: RankPool, world: int) -> None:
    cases = [
        Case(name, shape, dtype, near, chunks, turned=len(shape) > 1)
        for name in BY_HAND
        for near in ((2, 3, 8) if name == "hierarchical" else (1,))
        for shape, dtype, chunks in [
            ((), torch.float32, None), ((0,), torch.float32, None), ((1,), torch.float32, None),
            ((world - 1,), torch.float32, None), ((7, 13), torch.float32, 3), ((1000,), torch.float32, 7),
            *(((3, 5, 2), dtype, 2) for dtype in DTYPES),
        ]
    ]  # fmt: skip
    check(pool, world, cases)


def test_up_to_eight_ranks(pool: RankPool) -> None:
    for world in (7, 8):
        cases = [
            Case(name, shape, dtype, near, chunks, turned=len(shape) > 1, whole=True)
            for name in BY_HAND
            for near in ((2, 3, 4) if name == "hierarchical" else (1,))
            for shape, dtype, chunks in [
                ((), torch.float32, None), ((1,), torch.float32, None), ((world - 1,), torch.bfloat16, None),
                ((7, 13), torch.float32, 3), ((3, 5), torch.int16, 2),
            ]
        ]  # fmt: skip
        size = 4 * 840
        ring, levels = Case("ring", (840,), torch.float32), Case("hierarchical", (840,), torch.float32, near=2)
        sent = check(pool, world, [*cases, ring, levels])
        assert sent[-2] == [2 * (world - 1) * size // world] * world
        if world % 2 == 0:
            assert sent[-1] == sent[-2]


@pytest.mark.parametrize("world", [3, 4])
def test_other_reductions(pool: RankPool, world: int) -> None:
    check(pool, world, [Case(name, (31,), torch.float32, 2, op=op) for name in BY_HAND for op in OPS])


@settings(max_examples=12, deadline=None, phases=[Phase.generate])  # a failed rank is dear: no shrinking
@given(data=st.data())
def test_any_case(pool: RankPool, data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 5))
    case = st.builds(
        Case, algorithm=st.sampled_from(BY_HAND), shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        dtype=st.sampled_from(DTYPES), near=st.integers(1, 6), chunks=st.none() | st.integers(1, 9),
        op=st.just("sum"), turned=st.booleans(),
    )  # fmt: skip
    check(pool, world, data.draw(st.lists(case, min_size=1, max_size=6)))


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_bytes_match_the_formulas(pool: RankPool, world: int) -> None:
    count = 60 * 7
    size = 4 * count
    even, odd = Case("ring", (count,), torch.float32, chunks=7), Case("ring", (count + 1,), torch.float32)
    halving, tree = (Case(name, (count,), torch.float32) for name in ("halving", "tree"))
    doubling, levels = Case("doubling", (count,), torch.float32), Case("hierarchical", (count,), torch.float32, near=2)
    sent = check(pool, world, [even, odd, halving, tree, doubling, levels])
    assert sent[0] == [2 * (world - 1) * size // world] * world
    assert sum(sent[1]) == 2 * (world - 1) * (size + 4)
    assert sum(sent[3]) == 2 * (world - 1) * size
    if world in (2, 4):
        assert sent[2] == sent[0]
        assert sent[4] == [size * (world // 2)] * world  # log2 of 2 and of 4
        assert sent[5] == sent[0]


def halves(count: int) -> tuple[Tensor, int, Tensor, int, Tensor, Tensor]:
    axis = everyone()
    x = numbers(Case("ring", (count,), torch.float32), axis.rank)
    shard = algorithms.reduce_scatter(axis, x)
    first = axis.bytes["send"]
    axis.reset()
    whole = algorithms.all_gather(axis, shard, count)
    second = axis.bytes["send"]
    return shard, first, whole, second, algorithms.all_reduce(axis, x.clone(), "ring"), axis.all_reduce(x)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(pool: RankPool, world: int) -> None:
    count = 60
    for shard, first, whole, second, ring, native in pool.run(halves, world, count):
        assert first == second == (world - 1) * 4 * count // world
        assert shard.numel() == count // world
        assert torch.equal(whole, ring)
        torch.testing.assert_close(whole, native)
    output = pool.run(halves, world, world - 1)  # somebody's shard is empty
    assert sum(first for _, first, *_ in output) == (world - 1) * 4 * (world - 1)
    assert all(torch.equal(whole, ring) for _, _, whole, _, ring, _ in output)


def several(name: str) -> list[Tensor]:
    """Start several sums one after the other and wait at the end, as replicas do."""
    axis = everyone()
    tensors = [torch.full((size,), float(axis.rank + i)) for i, size in enumerate((5, 60_000, 1, 140_000))]
    works = [algorithms.start_all_reduce(axis, t, name, near=2) for t in tensors]
    for work in works:
        work.wait()
    return [t[[0, -1]] for t in tensors]


@pytest.mark.parametrize("name", BY_HAND)
def test_concurrent_sums_do_not_mix(pool: RankPool, name: str) -> None:
    for found in pool.run(several, 5, name):
        assert [t.tolist() for t in found] == [[10.0 + 5 * i] * 2 for i in range(4)]
