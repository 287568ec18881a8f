"""Layouts are compared on the way that one process took: near ties are told, and a wrong router is not hidden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.parity import make_job
from test_prove import a_trace
from torch import Tensor, nn

from weft.job.schema import Model
from weft.launch.rank_pool import RankPool
from weft.mesh import connect
from weft.models.attention import TokenInfo
from weft.models.experts.mixture_of_experts import MixtureOfExperts
from weft.parallel.expert.expert_load import ExpertLoad
from weft.planner import make_plan
from weft.verify.compare import compare
from weft.verify.prove import prove
from weft.verify.routing import Routing, RoutingReplay
from weft.verify.small_job import small

EXPERTS = {"count": 4, "top_k": 2, "ffn": 32, "shared": 1, "balance": "bias"}


@pytest.mark.parametrize(("precision", "steps"), [("bf16", 3), ("fp16", 2), ("fp8", 2)])
def test_experts_in_every_precision(pool: RankPool, precision: str, steps: int) -> None:
    wide = {"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "head_dim": 16, "layers": 2, "experts": EXPERTS}
    job = make_job(model=wide, data={"seq_len": 16}, precision=precision)
    for verdict in prove(job, ["tp2 ep2", "dp_shard=2 ep=2"], steps, pool=pool):
        assert verdict.verdict == "same", verdict
        assert verdict.routed_apart is not None and verdict.routed_apart < 0.05
        assert verdict.router_diff is not None and verdict.router_diff > 0


def routed(
    x: Tensor, folder: Path, reference: Path | None, weights: dict[str, Tensor]
) -> tuple[Tensor, Routing | None]:
    """What a mixture makes of some tokens, and what a proof says of its router."""
    _, plan = make_plan(make_job("parallel={dp_shard: 1}"), 1)
    model = Model.model_validate({"dim": 16, "ffn": 16, "activation": "swiglu", "experts": {**EXPERTS, "count": 16}})
    moe = MixtureOfExperts(model)
    moe.load_state_dict(weights)
    whole = nn.ModuleDict({"blocks": nn.ModuleList([moe])})
    load = ExpertLoad(whole, torch.device("cpu"), None)
    load.watch(whole)
    replay = RoutingReplay(load, str(folder), None if reference is None else str(reference))
    rows = torch.arange(x.shape[1])
    y = moe(x, TokenInfo(None, None, None, rows, len(rows), torch.arange(len(x))))
    return y, replay.end(connect(plan))


def test_near_ties_are_led_and_told_and_a_wrong_router_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(8, 64, 16), {
        "router.weight": torch.randn(16, 16), "bias": torch.zeros(16),
        **{f"experts.{n}.weight": torch.randn(16, 32, 16) for n in ("gate", "up")},
        **{f"shared.{n}.weight": torch.randn(32, 16) for n in ("gate", "up")},
        "experts.down.weight": torch.randn(16, 16, 32), "shared.down.weight": torch.randn(16, 32),
    }  # fmt: skip
    y, none = routed(x, tmp_path, None, weights)
    assert none is None
    rounded, near = routed(x + 1e-3 * torch.randn_like(x), tmp_path / "x", tmp_path, weights)
    assert near is not None and 0 < near.apart < 0.01 and near.scores < 0.01
    assert (rounded - y).norm() < 0.01 * y.norm()
    _, same = routed(x, tmp_path / "x", tmp_path, weights)
    assert same == Routing(0.0, 0.0)
    _, wrong = routed(x.roll(1, 1), tmp_path / "x", tmp_path, weights)
    assert wrong is not None and wrong.apart > 0.5 and wrong.scores > 0.5


def test_scores_that_differ_are_another_run() -> None:
    same = a_trace()
    assert compare("x", 2, same, replace(same, routing=Routing(0.01, 1e-6)), "fp32").verdict == "same"
    verdict = compare("x", 2, same, replace(same, routing=Routing(0.0, 1e-3)), "fp32")
    assert (verdict.verdict, verdict.router_diff) == ("differs", 1e-3)


def test_a_shrunk_model_keeps_its_groups() -> None:
    job = small(make_job(model={"experts": {"count": 256, "top_k": 8, "ffn": 2048, "groups": 8, "top_groups": 4}}))
    e = job.model.experts
    assert e is not None and (e.count, e.top_k, e.groups, e.top_groups) == (8, 2, 4, 2)
