"""Experts that change ranks at a checkpoint leave the model as it was: same losses, and a more even load by rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import expert_ranks, faulty_run
from helpers.command import python, run_of, write_job
from helpers.parity import make_job, section
from helpers.self_faults import write_orders
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.checkpoint.format import list_checkpoints
from weft.checkpoint.reader import load_full
from weft.job.errors import JobError
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.advice.expert_placement import better_copies, better_order, cost_of, fullest, place, rows_of
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout
from weft.watch.journal import read_jsonl, read_metrics


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 99), min_size=4, max_size=4))))
def test_every_expert_has_one_place(found: tuple[int, list[int]]) -> None:
    ranks, counts = found
    load = [float(c) for c in counts * ranks]
    order = better_order(load, ranks)
    assert sorted(order) == list(range(len(load)))


def test_hot_experts_are_separated() -> None:
    load = [8.0, 8.0, 1.0, 1.0]
    order = better_order(load, 2)
    assert (fullest(load, 2), fullest([load[e] for e in order], 2)) == (16 / 9, 1.0)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([(2, 2), (2, 1), (3, 2), (4, 2), (4, 1)]),
    st.lists(st.integers(0, 99), min_size=8, max_size=8),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_replicas_are_made_where_they_pay(shape: tuple[int, int], counts: list[int], room: int, price: int) -> None:
    ranks, own = shape
    load = [float(c) for c in counts[: ranks * own]]
    copies, rows, cost = better_copies(load, ranks, room, price)
    assert rows + cost <= max(rows_of(load, ranks)) and rows == max(rows_of(load, ranks, copies))
    assert rows + cost == pytest.approx(cost_of(load, ranks, copies, price))
    assert len(set(copies)) == len(copies) and all(e // own != r for e, r in copies)
    assert all(sum(x == r for _, x in copies) <= room for r in range(ranks))
    assert sum(rows_of(load, ranks, copies)) == pytest.approx(sum(load))


def test_one_hot_expert_is_replicated() -> None:
    load = [100.0, 0.0, 0.0, 0.0]
    found = place(load, 2, moves=True, room=1, price=5.0)
    assert (found.copies, found.rows, found.cost) == (((0, 1),), 50.0, 5.0)
    assert place(load, 2, moves=True, room=1, price=51.0).copies == (), "it costs more than it saves"


@pytest.mark.parametrize(("optimizer", "layout"), [("adamw", "dp_shard=4 ep=2"), ("adafactor", "tp2 ep2")])
def test_the_model_stays_the_same(pool: RankPool, optimizer: str, layout: str) -> None:
    experts = {"count": 4, "top_k": 1, "ffn": 24, "balance": "bias", "bias_rate": 1e-4}
    job = make_job(f"optim.name={optimizer}", model={"experts": experts}, train={"ema": 0.5})
    spread = make_plan(with_layout(job, section(layout)))
    still, moved, both = (
        pool.run(expert_ranks.move_experts, ranks(section(layout)), spread, how) for how in ("still", "moved", "both")
    )
    for changed in (moved, both):
        assert changed[0].order != sorted(changed[0].order)
        torch.testing.assert_close(changed[0].losses, still[0].losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(changed[0].norms, still[0].norms, rtol=1e-5, atol=1e-6)
        assert changed[0].counts == [still[0].counts[e] for e in changed[0].order]
    assert not moved[0].copies and both[0].copies


@pytest.mark.parametrize("layout", ["dp_shard=4 ep=4", "dp_shard=2 tp=2 ep=2", "pp2 zbv dp_shard=2 ep=2"])
def test_replicas_compute_the_same(pool: RankPool, layout: str) -> None:
    experts = {"count": 4, "top_k": 2, "ffn": 24, "shared": 1, "capacity": 1.2}
    again = "none" if "pp2" in layout else "full"
    job = make_job(f"memory.recompute={again}", model={"experts": experts}, optim={"name": "sgd", "momentum": 0.0})
    spread = make_plan(with_layout(job, section(layout)))
    still, copied = (
        pool.run(expert_ranks.move_experts, ranks(section(layout)), spread, how) for how in ("still", "copied")
    )
    for one, several in zip(still, copied, strict=True):
        assert several.copies
        torch.testing.assert_close(several.losses, one.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(several.norms, one.norms, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(several.weights, one.weights, rtol=1e-5, atol=1e-6)


def test_a_run_continues_with_the_same_losses(pool: RankPool, tmp_path: Path) -> None:
    """Two experts on two ranks, of which one is hotter: only a copy can help, and no guard takes it for a fault."""
    experts = {"count": 2, "top_k": 1, "ffn": 24, "balance": "bias", "bias_rate": 1e-4}
    output = {}
    for share in (0, 0.01):
        job = make_job(
            f"parallel.ep_rebalance={share}", "data.seq_len=64", "train.steps=5", "train.eval_every=0",
            "checkpoint.every=2", model={"experts": experts}, parallel={"dp_shard": 2, "ep": 2},
        )  # fmt: skip
        folder = tmp_path / str(share)
        assert {(code, step) for code, step, _ in pool.run(faulty_run.train, 2, job, str(folder), [], [])} == {(0, 5)}
        output[share] = [r["loss"] for r in read_jsonl(folder / "metrics.jsonl")]
    events = read_jsonl(folder / "events.jsonl")
    assert any(e["event"] == "rebalance" and e["copies"] for e in events)
    assert not any(e["event"] in ("fault", "recovered") for e in events)
    torch.testing.assert_close(output[0.01], output[0], rtol=1e-5, atol=1e-6)


def test_faults_and_stops_move_no_expert(tmp_path: Path) -> None:
    """A killed rank and a preemption between two checkpoints: the counts since the last one belong to the state."""
    write_job(
        tmp_path, model={"dim": 16, "layers": 2, "heads": 2, "ffn": 24, "experts": {"count": 8, "top_k": 2, "ffn": 24}},
        data={"seq_len": 32}, train={"steps": 14, "global_batch": 4, "eval_every": 0}, optim={"lr": 3e-2},
        checkpoint={"every": 6}, parallel={"dp_shard": 2, "ep": 2, "ep_rebalance": 0.001}, cluster={"device": "cpu"},
    )  # fmt: skip
    orders = [{"kind": "kill", "rank": 1, "step": 4}, {"kind": "launcher SIGTERM", "rank": 0, "step": 9}]
    for name, codes, wanted in (("calm", [0], []), ("hit", [75, 0], orders)):
        faults = write_orders(tmp_path / name, *wanted)
        for code in codes:
            result = python(tmp_path, "-m", "weft", "train", "job.yaml", f"name={name}", **faults)
            assert result.code == code, result.err
    calm, hit = run_of(tmp_path, "calm"), run_of(tmp_path, "hit")
    moves = [
        [{k: v for k, v in e.items() if k != "time"} for e in read_jsonl(run.events) if e["event"] == "rebalance"]
        for run in (calm, hit)
    ]
    assert moves[0] == moves[1] and [e["step"] for e in moves[0]] == [6, 12]
    assert [r["loss"] for r in read_metrics(calm.metrics)] == [r["loss"] for r in read_metrics(hit.metrics)]
    last = [load_full(list_checkpoints(run.checkpoints)[-1]) for run in (calm, hit)]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


def test_groups_are_copied_and_not_moved() -> None:
    experts = {"count": 4, "top_k": 1, "ffn": 24, "groups": 2}
    spread = {"dp_shard": 2, "ep": 2, "ep_rebalance": 0.1}
    plan = make_plan(make_job(model={"experts": experts}, parallel={**spread, "ep": -1, "ep_copies": 9}), 2)[1]
    assert (plan.ep, plan.ep_moves, plan.ep_copies) == (2, False, 2)
    with pytest.raises(JobError, match=r"ep_copies=0 allows ep_rebalance=0\.1 only to renumber experts"):
        make_plan(make_job(model={"experts": experts}, parallel={**spread, "ep_copies": 0}), 2)
