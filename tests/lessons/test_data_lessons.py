"""The lessons on collectives, data and tensor parallelism equal the engine: same weights, same batch."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.comm_axis import everyone
from torch import Tensor, nn

from weft.comm import algorithms
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.job.load import lessons, parse_job
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.models.build_model import build_model
from weft.models.init import initialise
from weft.planner import make_plan
from weft.verify.compare import Trace
from weft.verify.traced_run import trace

RANKS, LAYERS, DIM, BATCH = 4, 4, 12, 24


def load_lesson(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, lessons()[name])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both_sums(way: str, algorithm: str, size: int) -> tuple[Tensor, int, Tensor, int]:
    """On one rank: the lesson's sum and the bytes it sent, and the engine's."""
    lesson, axis = load_lesson("collectives"), everyone()
    x = torch.randn(size, generator=torch.Generator().manual_seed(axis.rank))
    mine = x.clone()
    getattr(lesson, way)(mine)
    return mine, lesson.SENT[0], algorithms.all_reduce(axis, x, algorithm, chunks=1), axis.bytes["send"]


@pytest.mark.parametrize("way", ["ring", "tree"])
@pytest.mark.parametrize(("world", "size"), [(4, 64), (3, 60), (2, 10)])
def test_sums_equal_the_engine(pool: RankPool, way: str, world: int, size: int) -> None:
    for mine, sent, its, its_sent in pool.run(both_sums, world, way, way, size):
        assert torch.equal(mine, its)
        assert sent == its_sent


def make_job(model: dict[str, Any] | None = None, /, **layout: Any) -> Job:
    return parse_job({
        "model": {"family": "mlp", "dim": DIM, "layers": LAYERS, "bias": True, **(model or {})},
        "data": {"source": "synthetic"},
        "train": {"global_batch": BATCH}, "cluster": {"device": "cpu", "devices_per_node": RANKS},
        "parallel": {"dp_shard": 1, **layout},
    })  # fmt: skip


def engine_of(pool: RankPool, job: Job) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        pool.run(trace, RANKS, job, 1, folder)
        return Trace.load(Path(folder))


def first_batch(job: Job) -> dict[str, Tensor]:
    loader = Loader(open_dataset(job), seed=job.train.seed, global_batch=BATCH, microbatch=BATCH, dp_rank=0, dp_size=1,
                    prefetch=0)  # fmt: skip
    return next(iter(loader))[0]


def first_layers(job: Job) -> nn.ModuleList:
    model = build_model(job.model).to_empty(device="cpu")
    for name, weight in model.named_parameters():
        with torch.no_grad():
            initialise(name, weight, model, job.train.seed)
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def replicas(way: str, layers: nn.ModuleList, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """On one rank: the lesson's gradients of the whole batch."""
    lesson, axis = load_lesson("data_parallel"), everyone()
    lesson.BUCKET = 200
    share = [batch[key].chunk(axis.size)[axis.rank] for key in ("inputs", "targets")]
    getattr(lesson, way)(layers, lesson.squared_error(layers, *share, BATCH))
    return {f"layers.{n}": p.grad for n, p in layers.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", ["naive", "buckets"])
def test_replica_gradients_equal_the_engine(pool: RankPool, way: str) -> None:
    job, _ = make_plan(make_job(dp_replicate=RANKS))
    engine = engine_of(pool, job)
    for grads in pool.run(replicas, RANKS, way, first_layers(job), first_batch(job)):
        assert grads.keys() == engine.gradients[0].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, engine.gradients[0][name], msg=lambda text, n=name: f"{n}: {text}")


def one_update(stage: int, start: list[Tensor], batch: dict[str, Tensor]) -> list[Tensor]:
    """On one rank: whole weights after the lesson's step in a stage of ZeRO."""
    lesson, axis = load_lesson("zero"), everyone()
    lesson.BATCH = BATCH
    weights = [w.chunk(axis.size)[axis.rank].clone() if stage == 3 else w.clone() for w in start]
    momentum = [torch.zeros_like(w.chunk(axis.size)[axis.rank]) for w in start]
    share = [batch[key].chunk(axis.size)[axis.rank] for key in ("inputs", "targets")]
    lesson.step(stage, [w.requires_grad_() for w in weights], momentum, *share)
    return [lesson.gather(w.detach()) if stage == 3 else w.detach() for w in weights]


def three_updates(start: list[Tensor], batch: dict[str, Tensor]) -> list[list[Tensor]]:
    return [one_update(stage, start, batch) for stage in (1, 2, 3)]


def test_zero_updates_equal_the_engine(pool: RankPool) -> None:
    job, _ = make_plan(make_job({"bias": False}, dp_shard=RANKS, zero=1))
    engine = engine_of(pool, job)
    lr, layers = load_lesson("zero").LR, first_layers(job)
    start = [weight.detach() for weight in layers.parameters()]
    for stages in pool.run(three_updates, RANKS, start, first_batch(job)):
        for weights in stages:
            for (name, before), after in zip(layers.named_parameters(), weights, strict=True):
                torch.testing.assert_close(after, before.detach() - lr * engine.gradients[0][f"layers.{name}"])


def matrices(layers: nn.ModuleList, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """On one rank: the lesson's loss, and whole gradients assembled from the ranks' shards."""
    lesson, axis = load_lesson("tensor_parallel"), everyone()
    shards = lesson.shards_of(list(layers), axis.rank, axis.size)
    loss = lesson.squared_error(lesson.forward(shards, batch["inputs"]), batch["targets"])
    loss.backward()
    grads = {}
    for i, (weight, bias) in enumerate(shards):
        grads[f"layers.{i}.weight"] = axis.all_gather(weight.grad, i % 2)
        grads[f"layers.{i}.bias"] = bias.grad if i % 2 else axis.all_gather(bias.grad, 0)
    assert lesson.SUMS == [LAYERS // 2, LAYERS // 2 - 1, 0]  # nobody asks for the gradient of the data
    dist.barrier()
    return float(loss), grads


def test_tensor_parallel_gradients_equal_the_engine(pool: RankPool) -> None:
    job, _ = make_plan(make_job(tp=RANKS))
    engine = engine_of(pool, job)
    for loss, grads in pool.run(matrices, RANKS, first_layers(job), first_batch(job)):
        assert loss == pytest.approx(engine.losses[0], rel=1e-6)
        assert grads.keys() == engine.gradients[0].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, engine.gradients[0][name], msg=lambda text, n=name: f"{n}: {text}")
