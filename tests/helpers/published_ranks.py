"""Functions on published weights that tests run on ranks."""

from __future__ import annotations

import torch

from weft.job import parse_job
from weft.mesh import connect
from weft.planner import make_plan
from weft.training.build import build_state
from weft.training.initial_weights import published_weights


@torch.no_grad()
def greedy(folder: str, tokens: int) -> list[int]:
    """The likeliest tokens after the first, under tensor parallelism over all ranks."""
    job, plan = make_plan(
        parse_job(
            {
                "model": {"pretrained": folder}, "data": {"source": "synthetic", "seq_len": 8},
                "cluster": {"device": "cpu", "devices_per_node": 2}, "parallel": {"tp": 2, "sequence": False},
                "train": {"global_batch": 1, "compile": False},
            }
        )
    )  # fmt: skip
    mesh = connect(plan, 300.0)
    model = build_state(job, plan, mesh, published_weights(job)).model
    module = model.module.eval()  # type: ignore[union-attr]
    ids = [1]
    for _ in range(tokens):
        ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    mesh.close()
    return ids
