"""The lesson's pipelines give the engine's gradients: same weights, same batch, same schedule."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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

RANKS, LAYERS, DIM, BATCH = 4, 8, 12, 24
SCHEDULES = ("naive", "gpipe", "1f1b")


def load_lesson() -> Any:
    spec = importlib.util.spec_from_file_location("lesson", lessons()["pipeline"])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_hand(schedule: str, weights: dict[str, Tensor], batch: dict[str, Tensor], m: int) -> dict[str, Any]:
    """On one rank: the lesson's loss, the gradients of its stage, and how many microbatches it kept at most."""
    lesson = load_lesson()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["WEFT_STORE"], RANKS), rank=rank, world_size=RANKS)
    layers = {}
    for i in range(rank * LAYERS // RANKS, (rank + 1) * LAYERS // RANKS):
        layers[i] = nn.Linear(DIM, DIM)
        layers[i].load_state_dict({key: weights[f"layers.{i}.{key}"] for key in ("weight", "bias")})
    stage = lesson.Stage(list(layers.values()), BATCH)
    microbatches = list(zip(batch["inputs"].chunk(m), batch["targets"].chunk(m), strict=True))
    lesson.train(stage, microbatches, lesson.KEEP[schedule](stage, m))
    grads = {f"layers.{i}.{n}": p.grad for i, layer in layers.items() for n, p in layer.named_parameters()}
    return {"loss": stage.loss, "kept": stage.most_kept, "grads": grads}


def make_job(schedule: str, m: int) -> Job:
    return parse_job({
        "model": {"family": "mlp", "dim": DIM, "layers": LAYERS, "bias": True}, "data": {"source": "synthetic"},
        "train": {"global_batch": BATCH}, "cluster": {"device": "cpu", "devices_per_node": RANKS},
        "parallel": {"pp": RANKS, "dp_shard": 1, "schedule": schedule, "microbatches": m},
    })  # fmt: skip


def first_batch(job: Job) -> dict[str, Tensor]:
    loader = Loader(open_dataset(job), seed=job.train.seed, global_batch=BATCH, microbatch=BATCH, dp_rank=0, dp_size=1,
                    prefetch=0)  # fmt: skip
    return next(iter(loader))[0]


def first_weights(job: Job) -> dict[str, Tensor]:
    model = build_model(job.model).to_empty(device="cpu")
    for name, weight in model.named_parameters():
        with torch.no_grad():
            initialise(name, weight, model, job.train.seed)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_lesson_has_the_gradients_of_the_engine(pool: RankPool, schedule: str, m: int) -> None:
    job, _ = make_plan(make_job(schedule, m))
    with tempfile.TemporaryDirectory() as folder:
        pool.run(trace, RANKS, job, 1, folder)
        engine = Trace.load(Path(folder))
    seen = pool.run(by_hand, RANKS, schedule, first_weights(job), first_batch(job), m)
    grads = {name: grad for rank in seen for name, grad in rank["grads"].items()}
    assert seen[-1]["loss"] == pytest.approx(engine.losses[0], rel=1e-6)
    assert grads.keys() == engine.gradients[0].keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, engine.gradients[0][name], msg=lambda text, n=name: f"{n}: {text}")
    assert seen[0]["kept"] == {"naive": 1, "gpipe": m, "1f1b": min(m, RANKS)}[schedule]
