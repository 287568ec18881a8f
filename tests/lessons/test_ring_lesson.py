"""The lesson's ring attention equals the engine's: same tokens, same output, same gradients."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist

from weft.job.load import lessons
from weft.launch.rank_pool import RankPool
from weft.mesh import connect
from weft.models.attention import TokenInfo
from weft.parallel.context.context_attention import Context
from weft.parallel.context.sequence_split import SequenceSplit
from weft.planner.plan import Plan

RANKS, LENGTH, HEADS, WIDTH = 4, 32, 2, 8


def both(length: int) -> tuple[float, bool]:
    """On one rank: the largest difference of output and gradients, and whether the same tokens are held."""
    spec = importlib.util.spec_from_file_location("lesson", lessons()["ring_attention"])
    assert spec and spec.loader
    lesson: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lesson)
    plan = Plan("cpu", "cpu", "gloo", cp=RANKS, zigzag=True)
    mesh = connect(plan)
    axis = mesh.axis("cp")
    assert axis is not None and dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    cut = SequenceSplit.of(plan, axis.rank)
    rows = cut.rows(length)
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn((1, length, HEADS, WIDTH), generator=random)[:, rows] for _ in range(4))
    parts = [t.requires_grad_() for t in (q, k, v)]
    engine = Context(axis, cut)(*parts, True, TokenInfo(None, None, None, rows, length))
    mine = [engine, *torch.autograd.grad(engine, parts, dout)]
    turned = [t.detach()[0].transpose(0, 1).requires_grad_() for t in parts]
    out = lesson.RingAttention.apply(*turned, length)
    its = [out, *torch.autograd.grad(out, turned, dout[0].transpose(0, 1))]
    off = max(float((a[0].transpose(0, 1) - b).abs().max()) for a, b in zip(mine, its, strict=True))
    return off, bool(torch.equal(rows, lesson.places(axis.rank, RANKS, length)))


def test_the_lesson_equals_the_engine(pool: RankPool) -> None:
    for off, same in pool.run(both, RANKS, LENGTH):
        assert off < 1e-5
        assert same
