"""Loops written for Accelerate, DeepSpeed and Horovod train as plain PyTorch does, on two ranks and in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import own_loops
from helpers.command import python
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import weft.deepspeed
from weft.extensions.adapters.accelerate.accelerator import Accelerator
from weft.extensions.adapters.deepspeed_engine import initialize
from weft.extensions.adapters.host_states import HostStates
from weft.extensions.adapters.rank_loader import RankBatches
from weft.job.errors import JobError
from weft.job.schema import Job, Parallel

SCRIPTS = Path(__file__).parent / "scripts"
Ranks = Callable[[int], Callable[..., list[Any]]]


@pytest.mark.parametrize(
    "parallel", [{}, {"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 1}], ids=["replicas", "zero 3", "zero 1"]
)
def test_an_accelerate_loop_trains_as_one_process(tmp_path: Path, world: Ranks, parallel: dict[str, Any]) -> None:
    expected = own_loops.plain_losses()
    first = world(2)(own_loops.accelerate_losses, parallel, str(tmp_path))[0]
    second = world(2)(own_loops.accelerate_losses, {}, str(tmp_path), True)[1]  # continued in another layout
    assert first + second == pytest.approx(expected, rel=1e-5)


def test_precision_is_that_of_autocast(tmp_path: Path, world: Ranks) -> None:
    found = world(2)(own_loops.accelerate_losses, {}, str(tmp_path), False, "bf16")[0]
    assert found == pytest.approx(own_loops.plain_losses()[:2], rel=2e-2)
    assert found != own_loops.plain_losses()[:2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_deepspeed_engine_trains_as_one_process(world: Ranks, stage: int) -> None:
    """Samples come in the order of DeepSpeed's loader."""
    ranks = world(2)(own_loops.deepspeed_losses, stage)
    means = [sum(losses) / 2 for losses in zip(*ranks, strict=True)]
    order = DistributedSampler(own_loops.data(), 1, 0)
    assert means == pytest.approx(own_loops.plain_losses(sampler=order), rel=1e-5)


@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-5), ("fp16", 1e-3), ("int8", 3e-2)])
def test_horovod_collectives_and_optimizer(world: Ranks, compression: str, tolerance: float) -> None:
    first, second = world(2)(own_loops.horovod_values, compression)
    assert (first["sum"], first["mean"], first["rows"], first["root"]) == (3.0, [0.5] * 3, [0, 1, 1], 1)
    assert (first["all"], second["all"], second["object"]) == ([0, 1, 10, 11], [2, 3, 12, 13], {"rank": 0})
    for one, other, plain in zip(first["weights"], second["weights"], own_loops.plain_weights(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, plain, rtol=tolerance, atol=tolerance)


def test_elastic_state_is_restored_and_loaded_on_another_number_of_ranks(tmp_path: Path, world: Ranks) -> None:
    committed = world(2)(own_loops.elastic_values, str(tmp_path), False)[0]
    alone = world(1)(own_loops.elastic_values, str(tmp_path), True)[0]
    assert (committed["epoch"], alone["epoch"], alone["loaded"]) == (2, 2, True)
    assert alone["momentum"] == pytest.approx(committed["momentum"])
    for one, other in zip(committed["weights"], alone["weights"], strict=True):
        assert torch.equal(one, other)


def torchrun(folder: Path, script: str, *args: str) -> dict[str, Any]:
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / script), *args)
    done = python(folder, *command)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out.strip().splitlines()[-1])
    return found


def test_a_script_for_accelerate(tmp_path: Path) -> None:
    found = torchrun(tmp_path, "accelerate_loop.py", str(tmp_path / "state"))
    dataset, model, losses = own_loops.data(44), own_loops.net(), []
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    for _ in range(2):
        batches = list(loader)
        batches.append(batches[0])  # 11 batches do not divide by 2 ranks
        for i in range(0, 12, 2):
            inputs, targets = (torch.cat(parts) for parts in zip(*batches[i : i + 2], strict=True))
            loss = functional.cross_entropy(model(inputs), targets)
            (loss / 2).backward()
            losses.append(loss.item())
            if i % 4 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                schedule.step()
                optimizer.zero_grad()
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert (found["total"], found["lr"]) == (44, pytest.approx(optimizer.param_groups[0]["lr"]))


def test_a_script_for_deepspeed(tmp_path: Path) -> None:
    found = torchrun(tmp_path, "deepspeed_loop.py", "--save", "saved")
    assert (found["steps"], found["client"]) == (6, {"epoch": 2})
    assert found["rates"][::2] == pytest.approx([0.0, 0.0, 1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    assert (tmp_path / "saved" / "latest").read_text() == "global_step6"


def test_a_script_for_horovod(tmp_path: Path) -> None:
    found = torchrun(tmp_path, "horovod_loop.py")
    (inputs, targets), model, losses = own_loops.data(32).tensors, own_loops.net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for i in range(0, 32, 8):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs[i : i + 8]), targets[i : i + 8])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert found["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(("samples", "size", "drop"), [(44, 4, False), (43, 4, False), (43, 4, True), (3, 4, False)])
def test_ranks_share_batches(samples: int, size: int, drop: bool) -> None:
    batches = torch.utils.data.BatchSampler(range(samples), size, drop)
    shares = [list(RankBatches(batches, rank, 2)) for rank in range(2)]
    assert [len(share) for share in shares] == [len(RankBatches(batches, 0, 2))] * 2
    together = [i for group in zip(*shares, strict=True) for share in group for i in share]
    new = samples if not drop else samples // (2 * size) * 2 * size
    assert together[:new] == list(range(new)) and all(len(s) == size for share in shares for s in share)


def test_what_is_not_supported_is_named() -> None:
    with pytest.raises(JobError, match="fsdp_plugin"):
        Accelerator(cpu=True, fsdp_plugin=object())
    with pytest.raises(JobError, match="no argument 'nonsense'"):
        Accelerator(nonsense=1)
    with pytest.raises(JobError, match=r"parallel\.pp=2 needs a job"):
        Accelerator(cpu=True, job=Job(parallel=Parallel(pp=2)))
    with pytest.raises(JobError, match="1 ranks were started"):
        Accelerator(cpu=True, job=Job(parallel=Parallel(dp_shard=4)))
    with pytest.raises(JobError, match="initialize needs config"):
        initialize(model=own_loops.net())
    with pytest.raises(JobError, match="train_batch_size=9"):
        initialize(model=own_loops.net(), config={"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2})
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}
    with pytest.raises(JobError, match=r"offload_optimizer\.device=nvme needs a job"):
        initialize(model=own_loops.net(), config=config)
    with pytest.raises(JobError, match=r"deepspeed\.moe\.layer\.MoE is not supported"):
        weft.deepspeed.moe.layer.MoE(8)
    with pytest.raises(JobError, match=r"sparse_attention\.mode cannot be used"):
        initialize(model=own_loops.net(), config={"train_batch_size": 8, "sparse_attention": {"mode": "fixed"}})


def test_a_config_with_offload_and_pipeline_trains_as_one_without(world: Ranks) -> None:
    """On CPU ranks weights and states are in host memory already; a module that is no PipelineModule has no stages."""
    more = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
    }
    assert world(2)(own_loops.deepspeed_losses, 3, more) == world(2)(own_loops.deepspeed_losses, 3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_update_by_chunks_of_offloaded_states_is_one_update(kind: Any) -> None:
    models = [own_loops.net(), own_loops.net()]
    for model, chunked in zip(models, (False, True), strict=True):
        groups = [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())]
        optimizer = kind(groups, lr=0.1)
        host = HostStates(optimizer, torch.device("cpu"), chunk_bytes=200)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().sum().backward()
            (host if chunked else optimizer).step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_without_summed_gradients_is_refused(world: Ranks) -> None:
    assert "call accelerator.backward(loss)" in world(2)(own_loops.step_after_plain_backward)[0]
