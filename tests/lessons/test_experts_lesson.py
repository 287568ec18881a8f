"""The lesson's experts equal the engine's: same weights, same tokens, same outputs, gradients and traffic."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from helpers.comm_axis import everyone
from torch import nn

from weft.job.load import lessons
from weft.job.schema import Model
from weft.launch.rank_pool import RankPool
from weft.models.attention import TokenInfo
from weft.models.experts.mixture_of_experts import MixtureOfExperts
from weft.parallel.expert.expert_parallel import ExpertDispatch

RANKS = 4


def both() -> tuple[float, int, int]:
    """On one rank: the largest difference of output and gradients, and the bytes that each way sent forward."""
    spec = importlib.util.spec_from_file_location("lesson", lessons()["experts"])
    assert spec and spec.loader
    lesson: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lesson)
    axis = everyone()
    own = lesson.EXPERTS // RANKS
    torch.manual_seed(1)
    router, up, down = (torch.randn(lesson.EXPERTS, *s) for s in ([lesson.DIM], [lesson.FFN, lesson.DIM],
                                                                  [lesson.DIM, lesson.FFN]))  # fmt: skip
    x, dout = (torch.randn(RANKS * lesson.TOKENS, lesson.DIM).chunk(RANKS)[axis.rank] for _ in range(2))
    mine = slice(axis.rank * own, (axis.rank + 1) * own)
    weights = [x, router, up[mine], down[mine]]
    its = [w.clone().requires_grad_() for w in weights]
    out, sent = lesson.together(*its)
    theirs = [out, *torch.autograd.grad(out, its, dout)]
    experts = {"count": lesson.EXPERTS, "top_k": lesson.TOP, "ffn": lesson.FFN, "balance": "none"}
    described = {"dim": lesson.DIM, "ffn": lesson.FFN, "activation": "gelu", "experts": experts}
    moe = MixtureOfExperts(Model.model_validate(described))
    moe.router.weight = nn.Parameter(router.clone())
    moe.experts.up.weight, moe.experts.down.weight = nn.Parameter(up[mine].clone()), nn.Parameter(down[mine].clone())
    moe.layout = ExpertDispatch(None, False, None, axis)
    tokens = x.clone().requires_grad_()
    info = TokenInfo(None, None, None, torch.arange(lesson.TOKENS), lesson.TOKENS)
    y = moe(tokens.unsqueeze(0), info)[0]
    moved = axis.bytes["all_to_all"] // 2  # there; as many came back as others had sent
    ours = [y, *torch.autograd.grad(y, [tokens, *moe.parameters()], dout)]
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True)]
    off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return off, sent * lesson.DIM * 4, moved


def test_the_lesson_equals_the_engine(pool: RankPool) -> None:
    found = pool.run(both, RANKS)
    assert all(off < 1e-5 for off, _, _ in found)
    assert sum(sent for _, sent, _ in found) == sum(moved for _, _, moved in found)
