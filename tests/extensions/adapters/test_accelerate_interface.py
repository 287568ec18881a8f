"""weft.accelerate gives scripts what Accelerate gives them: ranks, loaders, gathered values, gradients, trackers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import accelerate_values, own_loops
from torch.nn import functional

from weft import accelerate
from weft.accelerate import Accelerator
from weft.job.errors import JobError

Ranks = Callable[[int], Callable[..., list[Any]]]


def test_each_sample_is_gathered_once(world: Ranks) -> None:
    first, second = world(2)(accelerate_values.loaders)
    assert first["dropped"] == [list(range(10)), list(range(10, 20))]
    assert first["filled"] == first["batches as samples"] == [[0, 1, 2, 3], [4, 5, 6]]
    assert first["fewer than sampled"] == [[0, 1, 2, 3], [4]]
    for kind in ("streamed", "streamed, split", "streamed, dispatched"):
        assert first[kind] == second[kind] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    for kind in ("uneven", "uneven, streamed"):
        assert (first[kind], second[kind]) == ([[0, 1], [4, 5]], [[2, 3], [6]])
    assert first["words"] == [list("abcd"), ["e"]]
    assert first["seeded"][0] == first["seeded"][2] != first["seeded"][1]
    assert sorted(i for values in (first, second) for batch in values["seeded"][0] for i in batch) == list(range(8))


def test_ranks_shares_and_operations(tmp_path: Path, world: Ranks) -> None:
    first, second = world(2)(accelerate_values.ranks_and_values, str(tmp_path))
    assert first["type"] == "MULTI_CPU"
    assert first["shares"] == {"list": [1, 2], "dict": {"a": ["a", "b"], "b": [0, 1]}, "tensor": [0, 1]}
    assert second["shares"] == {"list": [3, 3], "dict": {"a": ["c", "c"], "b": [2, 2]}, "tensor": [2, 2]}
    assert (first["printed"], second["printed"]) == (["main"], ["last", "one"])
    assert first["triggers"] == second["triggers"] == [False, True, False]
    assert first["objects"] == {"t": torch.tensor([1]), (1, 2): {"x"}, "n": None}
    assert (first["largest"], first["sent"], first["freed"]) == ([1, 0], [1, "x"], [None, None])
    assert "rank 0: [1]; rank 1: [2]" in first["error"] == second["error"]
    assert first["events"] == 1


def test_gradients_of_several_passes_and_models(world: Ranks) -> None:
    for values in world(2)(accelerate_values.gradients):
        assert values == dict.fromkeys(values, True)


def test_ranks_whose_batches_end_first_join_the_others(world: Ranks) -> None:
    first, second = world(2)(accelerate_values.joined)
    assert (first["passes"], second["passes"]) == (2, 1)
    assert "only supported for map-style datasets" in first["warning"]
    model = own_loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = own_loops.data(12).tensors
    for rows in (slice(0, 8), slice(8, 12)):
        loss = functional.cross_entropy(model(inputs[rows]), targets[rows])
        (loss if rows.stop == 8 else loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other, plain in zip(first["weights"], second["weights"], model.parameters(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, plain.detach(), rtol=1e-5, atol=1e-6)


def test_local_steps_are_averaged(world: Ranks) -> None:
    inputs, targets = own_loops.data(16).tensors
    alone = []
    for rank in range(2):
        model = own_loops.net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for start in (4 * rank, 8 + 4 * rank):
            functional.cross_entropy(model(inputs[start : start + 4]), targets[start : start + 4]).backward()
            optimizer.step()
            optimizer.zero_grad()
        alone.append([p.detach() for p in model.parameters()])
    for weight, one, other in zip(world(2)(accelerate_values.local_steps)[0], *alone, strict=True):
        torch.testing.assert_close(weight, (one + other) / 2, rtol=1e-5, atol=1e-6)


def test_the_position_in_a_loader_is_saved(tmp_path: Path, world: Ranks) -> None:
    for rest, again in world(2)(accelerate_values.continued, str(tmp_path)):
        assert rest == again and len(rest) == 4


def test_a_batch_size_that_fits_is_found() -> None:
    tried = []

    @accelerate.find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    assert train() == 8 and tried == [10, 9, 8]


def test_a_handler_or_tracker_without_counterpart_is_named() -> None:
    class GradScalerKwargs:
        pass

    with pytest.raises(JobError, match="GradScalerKwargs is not supported"):
        Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs()])
    with pytest.raises(JobError, match="log_with='clearml' is not supported; tensorboard"):
        Accelerator(cpu=True, log_with="clearml")
    hook = accelerate.DistributedDataParallelKwargs(
        comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2}
    )
    assert Accelerator(cpu=True, kwargs_handlers=[hook]).job.comm.compression == "powersgd:2"
    with pytest.raises(JobError, match="a loader that prepare returned"):
        accelerate.skip_first_batches([1, 2], 1)


def test_checkpoints_with_numbers(tmp_path: Path) -> None:
    config = accelerate.ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    model: Any = accelerator.prepare(own_loops.net())
    for value in range(3):
        with torch.no_grad():
            model[0].bias.fill_(value)
        accelerator.save_state()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    with torch.no_grad():
        model[0].bias.fill_(9)
    accelerator.load_state()
    assert model[0].bias.eq(2).all() and accelerator.save_iteration == 3
