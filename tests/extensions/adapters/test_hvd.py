"""Parts of weft.hvd in one process."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import weft.hvd as hvd
from weft.extensions.adapters.hvd.coordinator import CollectiveCoordinator, Message
from weft.extensions.adapters.hvd.reduce_ops import adasum, scaled
from weft.job.errors import JobError

SIGNATURES = {
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async": "tensor average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "broadcast_object": "obj root_rank name process_set",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positions_of_arguments_are_horovods(name: str) -> None:
    assert " ".join(inspect.signature(getattr(hvd, name)).parameters) == SIGNATURES[name]


@pytest.fixture
def answers() -> tuple[CollectiveCoordinator, list[tuple[int, Message]]]:
    sent: list[tuple[int, Message]] = []
    return CollectiveCoordinator(3, lambda rank, answer: sent.append((rank, answer))), sent


def _sum(name: str, **changed: Any) -> Message:
    request = {"do": "allreduce", "name": name, "set": 0, "dtypes": ["float32"], "shapes": [[2]], "device": "cpu"}
    return {**request, "op": 1, "scale": [1.0, 1.0], **changed}


def test_a_collective_begins_when_all_ranks_have_asked(answers: Any) -> None:
    coordinator, sent = answers
    for rank, name in ((0, "a"), (1, "b"), (2, "b"), (0, "b"), (2, "a")):
        coordinator.receive(rank, _sum(name))
    assert [(rank, answer["name"]) for rank, answer in sent] == [(0, "b"), (1, "b"), (2, "b")]
    coordinator.receive(1, {"do": "join"})
    assert [(rank, answer["name"]) for rank, answer in sent[3:]] == [(0, "a"), (1, "a"), (2, "a")]
    assert sent[4][1]["shapes"] == [[2]]
    coordinator.receive(0, _sum("c", op=4))
    coordinator.receive(2, _sum("c", op=4))
    assert "rank 1 is in join(), where allreduce with op=Max cannot be" in sent[-1][1]["error"]


def test_what_waits_for_a_rank_that_is_gone_fails(answers: Any) -> None:
    coordinator, sent = answers
    coordinator.receive(0, _sum("a"))
    coordinator.receive(1, _sum("a"))
    assert not sent
    coordinator.leave(2, "is gone")
    assert [(rank, answer["error"]) for rank, answer in sent] == [(0, "rank 2 is gone"), (1, "rank 2 is gone")]


def test_integers_are_scaled_in_fp64_and_truncated() -> None:
    assert scaled(torch.tensor([2**53, -3]), 1.0, 3).tolist() == [2**53 // 3, -1]
    assert scaled(torch.tensor([60000.0], dtype=torch.float16), 2.0, 4).tolist() == [30000.0]


def test_adasum_of_parallel_and_orthogonal_gradients() -> None:
    x, y = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert adasum(x, x).tolist() == [3.0, 0.0] and adasum(x, y).tolist() == [3.0, 4.0]
    assert adasum(x, torch.zeros(2)).tolist() == [3.0, 0.0]


def test_one_process() -> None:
    with pytest.raises(ValueError, match=r"hvd\.init\(\) was not called"):
        hvd.rank()
    hvd.init()
    try:
        value = torch.arange(2.0)
        assert hvd.allreduce(value, op=hvd.Product).tolist() == hvd.allgather(value).tolist() == [0.0, 1.0]
        assert hvd.alltoall(value, [1])[0].tolist() == [0.0] and hvd.reducescatter(value).tolist() == [0.0, 1.0]
        assert hvd.broadcast_object({1: 2}) == {1: 2} and hvd.join() == 0
        with pytest.raises(ValueError, match="average or op, not both"):
            hvd.allreduce(value, average=True, op=hvd.Sum)
        with pytest.raises(JobError, match=r"torch\.profiler"):
            hvd.start_timeline("file")
        sampler = hvd.elastic.ElasticSampler(range(7), shuffle=False)
        sampler.record_batch(0, 3)
        model = nn.Linear(1, 1)
        state: Any = hvd.elastic.TorchState(model, sampler=sampler, epoch=1)
        sampler.record_batch(1, 3)
        state.epoch = 2
        state.restore()
        assert (state.epoch, list(sampler)) == (1, [3, 4, 5, 6])
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        wrapped = hvd.DistributedOptimizer(optimizer)
        for _ in range(2):  # one process may accumulate as it likes
            model(torch.ones(1, 1)).sum().backward()
        before = model.bias.item()
        wrapped.step()
        assert model.bias.item() == pytest.approx(before - 0.2)
        assert schedule.get_last_lr() == [0.1]
    finally:
        hvd.shutdown()
