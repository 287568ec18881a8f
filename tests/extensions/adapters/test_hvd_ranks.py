"""weft.hvd on two ranks does what Horovod's documentation and tests say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import hvd_ranks

Ranks = Callable[[int], Callable[..., list[Any]]]


def test_values_and_gradients_of_collectives(world: Ranks) -> None:
    """Gradients as Horovod defines them: of allgather and broadcast means over ranks, of the others sums."""
    first, second = world(2)(hvd_ranks.collectives)
    for one in (first, second):
        assert one["scaled"] == [15, 15, 21, 21]  # halves of 0..3 and 10..13, truncated, added, times 3
        assert one["product"] == [0.0, 11.0, 24.0, 39.0]
        assert one["adasum"] == pytest.approx([1.25, 0.75])  # 3/4 of (1, 1) and 1/2 of (1, 0)
        assert (one["in place"], one["group"]) == ([10.0, 12.0, 14.0, 16.0], [[10.0, 11.0, 12.0, 13.0]] * 2)
        assert one["sum"] == ([10.0, 12.0, 14.0, 16.0], [2.0, 4.0, 6.0, 8.0])
        assert one["mean fp16"] == ([5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0])
        assert one["allgather"][0] == [0.0, 10.0, 11.0] and one["broadcast"][0] == [10.0, 11.0, 12.0]
        assert one["bools"] == [[True, False], [True, True]] and one["sparse"] == [[0.5, 0.5]]
        assert one["no gradient"] == (
            "NotImplementedError: allreduce with op=hvd.Max has no gradient; hvd.Sum or hvd.Average has one"
        )
        assert one["objects"] == {
            1: "tuple (2, [b'x'])", "set": "set {3}", "array": "ndarray [0 1]", "number": "float64 0.5",
            "tensor": "Tensor tensor([1.])",
        }  # fmt: skip
        assert one["gathered"] == [(0, None), (1, None)]
        assert "TypeError: an object of type Generator cannot be sent" in one["refused object"]
    assert (first["allgather"][1], second["allgather"][1]) == ([1.0], [2.0, 3.0])
    assert (first["broadcast"][1], second["broadcast"][1]) == ([0.0] * 3, [1.0, 2.0, 3.0])
    assert first["alltoall"] == ([0.0, 10.0], [1.0, 1.0, 2.0]) and first["received"] == [1, 1]
    assert second["alltoall"] == ([1.0, 2.0, 11.0, 12.0], [2.0, 3.0, 4.0]) and second["received"] == [2, 2]
    assert first["reducescatter"] == ([20.0, 24.0], [4.0, 8.0, 4.0]) and second["reducescatter"][0] == [28.0]
    assert (first["mean scatter"], second["mean scatter"]) == ([10.0, 12.0], [14.0])


def test_errors_on_every_rank_process_sets_and_join(world: Ranks) -> None:
    first, second = world(2)(hvd_ranks.errors)
    internal = "HorovodInternalError: "
    for one in (first, second):
        assert one["shapes"] == f"{internal}allreduce.a: shapes do not fit: [[2]] on rank 0, [[3]] on rank 1"
        assert one["dtypes"] == f"{internal}allgather.a: dtypes differ: ['float32'] on rank 0, ['int32'] on rank 1"
        assert one["columns"] == (
            f"{internal}alltoall.a: shapes do not fit: [[1]] on rank 0, [[2]] on rank 1 after the first dimension"
        )
        assert one["roots"] == f"{internal}broadcast.a: root ranks differ: 0 on rank 0, 1 on rank 1"
        assert one["ops"] == f"{internal}reducescatter.a: values of op differ: 0 on rank 0, 1 on rank 1"
        assert one["keyword"].startswith("TypeError") and "color" in one["keyword"]
        assert one["again"].endswith("a process set of the ranks [0, 1] exists already")
        assert one["removed"] == (True, False, None)
        assert (one["last"], one["after"]) == (0, 1.5)
    rows = "alltoall without splits needs rows that 2 ranks divide, not 1"
    assert second["one rank"] == f"ValueError: alltoall.a: {rows}" and first["one rank"] == f"{internal}rank 1: {rows}"
    assert first["member"] == (1, True, "no error")
    assert second["member"][:2] == (1, False) and "rank 1 does not belong to ProcessSet" in second["member"][2]
    assert first["mean with zeros"] == 1.5 and "rank 1 is in join(), where allgather cannot be" in first["joined"]
    assert first["twice"] == "ValueError: allreduce.twice is under way already; wait for it, or use another name"
    assert "rank 1 has called hvd.shutdown() or has ended" in first["left"]


def test_optimizers_train_the_mean_of_the_ranks(world: Ranks) -> None:
    first, second = world(2)(hvd_ranks.optimizers)
    for name in hvd_ranks.OPTIONS:
        for one, other, plain in zip(first[name], second[name], hvd_ranks.plain_weights(), strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, plain, rtol=1e-3 if name == "fp16" else 1e-5, atol=1e-3)
    assert first["adam"] == second["adam"] and second["adam"][:2] == (0.1, (0.8, 0.9))
    assert [error.split(":")[0] for error in first["refused"]] == ["ValueError"] * 4
    assert first["adasum"] == second["adasum"] == 0.5
    assert "a larger backward_passes_per_step would work" in first["too many passes"]
    assert first["too early"].startswith("AssertionError: zero_grad() was called between backward() and step()")
