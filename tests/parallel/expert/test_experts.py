"""Experts sharded over ep are the same run as one process: every router, axis and balance."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import expert_ranks, on_ranks
from helpers.parity import check, make_job, section

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import prove, with_layout

EXPERTS: dict[str, Any] = {"count": 4, "top_k": 2, "ffn": 24}
# everything that a router may have at once
FULL = {**EXPERTS, "shared": 1, "z_weight": 0.001, "balance": "bias", "aux_weight": 0.02, "capacity": 1.1}
LAYOUTS = (
    "dp_shard=4 ep=4", "dp_shard=4 zero2 ep=2", "dp_shard=2 zero1 tp=2 ep=2", "dp_shard=2 tp=2 ep=4",
    "dp_replicate=2 dp_shard=2 ep=2", "pp2 dp_shard=2 ep=2", "pp2 zbv tp2 ep2 ep_overlap",
    "cp2 tp2 ep4", "cp2 ulysses dp_shard=2 ep=4", "tp2 ep2 no-sequence", "ddp2",
)  # fmt: skip


def experts_job(experts: dict[str, Any], *overrides: str, **sections: Any) -> Job:
    model = {"experts": experts, **sections.pop("model", {})}
    return make_job(*overrides, model=model, **sections)


def test_every_axis(pool: RankPool) -> None:
    check(pool, experts_job(FULL, train={"ema": 0.5}), LAYOUTS)


@pytest.mark.parametrize(
    ("experts", "layouts"),
    [
        ({"router": "softmax", "renormalize": False, "groups": 2, "top_groups": 1, "first_dense": 1},
         ("tp2 ep2", "pp2 dp_shard=2 ep=2")),
        ({"router": "sigmoid", "scale": 2.5, "groups": 2, "top_groups": 2, "balance": "aux", "aux_weight": 0.05},
         ("dp_shard=4 ep=4", "cp2 ep2")),
        ({"top_k": 1, "balance": "aux", "aux_scope": "batch", "aux_weight": 0.1, "capacity": 0.7, "shared": 2},
         ("dp_shard=4 ep=4", "pp2 dp_shard=2 ep=2")),
    ],
)  # fmt: skip
def test_every_router(pool: RankPool, experts: dict[str, Any], layouts: tuple[str, ...]) -> None:
    gpt2 = {"family": "gpt2", "dropout": 0.2} if experts.get("top_k") == 1 else {}
    check(pool, experts_job({**EXPERTS, **experts}, model=gpt2), layouts)


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.name=muon", "memory.recompute=full"),
        ("optim.name=adafactor", "memory.recompute=selective"),
        ("optim.name=sgd",),
    ],
)
def test_every_optimizer(pool: RankPool, overrides: tuple[str, ...]) -> None:
    job = experts_job(FULL, *overrides, "train.accumulation=1")
    check(pool, job, ("dp_shard=4 ep=2 ep_overlap", "dp_shard=2 ep=2", "tp2 ep2"), steps=2)


def run_loads(pool: RankPool, job: Job, layout: str, *args: Any) -> list[expert_ranks.Loads]:
    spread = section(layout)
    return pool.run(expert_ranks.loads, ranks(spread), make_plan(with_layout(job, spread)), *args)


def test_drops_the_same_tokens_in_every_layout(pool: RankPool) -> None:
    job = experts_job({**EXPERTS, "capacity": 0.8, "balance": "none"})
    alone = run_loads(pool, job, "1", 2)[0]
    dropped = [[block[-3] for block in step] for step in alone.tables]
    assert all(n > 0 for step in dropped for n in step)
    for layout in ("dp_shard=4 ep=4", "cp2 tp2 ep2", "pp2 tp2 ep2"):
        for seen in run_loads(pool, job, layout, 2):
            assert [[block[:-2] for block in step] for step in seen.tables] == [
                [block[:-2] for block in step] for step in alone.tables
            ]


@pytest.mark.parametrize(("top_k", "seq_len"), [(1, 8), (2, 8), (1, 1)])
def test_all_tokens_to_one_expert(pool: RankPool, top_k: int, seq_len: int) -> None:
    """The other experts get no tokens; also with a single token."""
    batch = 1 if seq_len == 1 else 8
    job = experts_job(
        {**EXPERTS, "top_k": top_k, "balance": "bias", "bias_rate": 1e-9},
        f"data.seq_len={seq_len}", f"train.global_batch={batch}", "train.accumulation=1",
    )  # fmt: skip
    alone = run_loads(pool, job, "1", 1, 1)[0]
    assert alone.tables[0][0][1] == batch * seq_len
    layouts = ("tp2 ep2", "cp2 tp2 ep4") if batch == 1 else ("dp_shard=4 ep=4", "tp2 ep2")
    for layout in layouts:
        for seen in run_loads(pool, job, layout, 1, 1):
            assert [block[:5] for block in seen.tables[0]] == [block[:5] for block in alone.tables[0]]
            torch.testing.assert_close(seen.losses, alone.losses, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(seen.norms, alone.norms, rtol=1e-5, atol=1e-6)


def test_only_routed_tokens_are_sent(pool: RankPool) -> None:
    job = experts_job({**EXPERTS, "balance": "bias", "top_k": 1}, "train.accumulation=1")
    seen = run_loads(pool, job, "dp_shard=2 ep=2", 1, 1)
    tokens, dim, layers = 8 * 8 // 2, 16, 2  # of each rank
    # rank 0 holds the favourite: it sends nothing forward and all of the others' results and gradients back
    one_way = tokens * 1 * dim * 4
    assert [s.moved["all_to_all"] for s in seen] == [2 * layers * one_way] * 2
    assert all(s.calls["all_to_all"] == 4 * layers for s in seen)
    even = run_loads(pool, experts_job({**EXPERTS, "balance": "none"}, "train.accumulation=1"), "dp_shard=2 ep=2", 1)
    sent = sum(s.moved["all_to_all"] for s in even)
    routed = tokens * 2 * EXPERTS["top_k"] * dim * 4
    assert 0 < sent < 4 * layers * routed, "what stays on its rank is not counted"
    assert sum(s.held for s in even) == 2 * 3 * 4 * 24 * dim, "each element of an expert is updated on one rank"


def test_two_hops_equal_one_all_to_all(pool: RankPool) -> None:
    """Two nodes of two ranks each: tokens are first sent inside the node."""
    job = experts_job({**EXPERTS, "shared": 1, "capacity": 1.0}, "train.accumulation=1")
    direct = with_layout(job, section("dp_shard=4 ep=4"))
    hopping = direct.model_copy(
        update={
            "cluster": direct.cluster.model_copy(update={"nodes": 2, "devices_per_node": 2}),
            "parallel": direct.parallel.model_copy(update={"ep_exchange": "two-hop"}),  # type: ignore[union-attr]
        }
    )
    assert make_plan(hopping)[1].ep_hop == 2
    one, two = (pool.run(expert_ranks.loads, 4, make_plan(j), 2) for j in (direct, hopping))
    assert [t.losses for t in two] == [t.losses for t in one]
    assert [t.norms for t in two] == [t.norms for t in one]
    assert all(t.moved["all_to_all"] == 0 for t in two), "nothing goes directly"


def test_bias_follows_the_load(pool: RankPool) -> None:
    job = experts_job({**EXPERTS, "balance": "bias", "bias_rate": 0.01})
    alone, spread = run_loads(pool, job, "1", 2)[0], run_loads(pool, job, "pp2 dp_shard=2 ep=2", 2)
    expected = torch.zeros(4)
    for step in alone.tables:
        counts = torch.tensor(step[0][:4])
        expected += 0.01 * torch.sign(counts.mean() - counts)
    torch.testing.assert_close(alone.buffers["blocks.0.mlp.bias"], expected)
    for name, bias in alone.buffers.items():
        assert any(name in s.buffers for s in spread)
        assert all(torch.equal(s.buffers[name], bias) for s in spread if name in s.buffers)


def test_checkpoints_move(pool: RankPool, tmp_path: Path) -> None:
    job = experts_job({**EXPERTS, "balance": "bias"}, train={"ema": 0.5})
    before = None
    for train, layout in ((2, "dp_shard=4 ep=4"), (1, "tp2 ep2"), (1, "1"), (0, "dp_shard=2 tp=2 ep=2")):
        with tempfile.TemporaryDirectory() as folder:
            spread, file = section(layout), Path(folder) / "state.pt"
            planned = make_plan(with_layout(job, spread))
            pool.run(on_ranks.move, ranks(spread), planned, str(tmp_path), train, str(file))
            opened, saved = torch.load(file, weights_only=False)
        if before is not None:
            assert opened.keys() == before.keys()
            assert not [n for n in before if not torch.equal(opened[n], before[n])]
        assert saved["model.blocks.0.mlp.experts.up.weight"].shape == (4, 24, 16)
        assert saved["buffer.blocks.0.mlp.bias"].abs().sum() > 0
        before = saved


def test_prove_knows_ep(pool: RankPool) -> None:
    verdicts = prove(experts_job(EXPERTS), ["dp_shard=2 ep=2", "ep=2"], steps=1, pool=pool)
    assert [v.verdict for v in verdicts] == ["same", "refused"]
    assert "does not divide" in str(verdicts[1].why)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.family=vit", "parallel={dp_shard: 1}"], "needs a decoder, and model.family=vit is not one"),
        (["model.family=mlp", "parallel={dp_shard: 1}"], "needs a decoder, and model.family=mlp is not one"),
        (["parallel={dp_shard: 2, ep: 4}"], "ep=4 is laid over dp_shard × cp × tp, which are 2 ranks"),
        (["parallel={dp_shard: 3, ep: 3}", "train.global_batch=9", "train.accumulation=1"],
         "parallel.ep=3 does not divide model.experts.count=4; ep=1 would work"),
        (["model.experts.first_dense=2", "parallel={dp_shard: 2, ep: 2}"], "leaves none of the 2 blocks with experts"),
        (["memory.chunk=4", "parallel={dp_shard: 1}"], "memory.chunk=4 processes a block in parts"),
        (["model.experts=null", "parallel={dp_shard: 2, ep: 2}"], "distributes experts, and the model has none"),
    ],
)  # fmt: skip
def test_refusals(overrides: list[str], words: str) -> None:
    with pytest.raises(JobError) as refused:
        make_plan(experts_job(EXPERTS, *overrides), next(n for n in (3, 2, 1) if f"dp_shard: {n}" in str(overrides)))
    assert words in str(refused.value)
