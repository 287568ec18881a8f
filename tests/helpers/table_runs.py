"""Runs of a model with embedding tables, on ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.checkpoint.save_load import load, save
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.job import parse_job
from weft.mesh import connect
from weft.planner import make_plan
from weft.training.build import build_state
from weft.training.step import Stepper
from weft.verify.prove import with_layout
from weft.verify.traced_run import join_tensors, whole

JOB: dict[str, Any] = {
    "model": {
        "family": "dlrm", "dim": 6, "dense_features": 3, "bottom": [8], "top": [8],
        "tables": [
            {"name": "user", "rows": 31, "spread": "row"},
            {"name": "item", "rows": 17, "spread": "table"},
            {"name": "genres", "rows": 9, "spread": "column", "pooling": "mean"},
            {"name": "day", "rows": 5, "spread": "replicate"},
            {"name": "shop", "rows": 7},
        ],
    },
    "data": {"source": "synthetic"},
    "train": {"global_batch": 16, "accumulation": 2, "steps": 10},
    "optim": {"lr": 0.05, "warmup": 0, "schedule": "constant", "clip": 0.5},
}  # fmt: skip


def with_tables(changes: dict[str, Any], **model: Any) -> dict[str, Any]:
    """JOB with some fields of every table, and of the model, changed."""
    tables = [{**table, **changes} for table in JOB["model"]["tables"]]
    return {**JOB, "model": {**JOB["model"], "tables": tables, **model}}


def train_tables(
    raw: dict[str, Any], layout: dict[str, Any], steps: int, folder: str | None = None, resume: str | None = None
) -> dict[str, Tensor]:
    """Train some steps, from a checkpoint in `resume`, and save one in `folder`; returns every saved tensor, whole."""
    job, plan = make_plan(with_layout(parse_job(raw), layout))
    mesh = connect(plan)
    state = build_state(job, plan, mesh)
    if resume is not None:
        tensors = state.loadable_tensors(saved_world=0)
        meta = load(resume, tensors, mesh)
        assert meta is not None
        state.restore(tensors, meta)
    stepper = Stepper(job, plan, mesh, state)
    loader = Loader(
        open_dataset(job), seed=0, global_batch=job.train.global_batch, microbatch=plan.microbatch, prefetch=0,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, start_step=state.step,
    )  # fmt: skip
    for _, batches in zip(range(steps), loader, strict=False):
        stepper.update(stepper.gradients(batches), job.optim.lr)
    if folder is not None:
        save(folder, state.saved(), mesh, step=state.step, meta=state.meta(job, plan))
    held = {n: whole(t) for n, t in state.tensors().items() if not n.startswith("random")}
    join_tensors(held, mesh.everyone, mesh)
    return held
