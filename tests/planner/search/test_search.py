"""The space and the search: degrees multiply to the world, and bounds find what looking at everything finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.job import parse_job
from weft.job.shapes import resolve
from weft.planner.estimator import Estimator, make_estimator
from weft.planner.make_plan import make_plan, pick_layout, start_plan
from weft.planner.memory.layout_ranks import SPLITS
from weft.planner.plan import Plan
from weft.planner.rules.tensor_rules import heads_fit
from weft.planner.search.branch_and_bound import find_layouts
from weft.planner.search.candidates import RECOMPUTES, Layouts
from weft.planner.search.frontier import TIME_TOLERANCE
from weft.planner.search.space import all_layouts, coarse, count, job_space
from weft.planner.search.survey import survey


def job_of(model: Any, nodes: int, batch: int, seq: int = 2048, device: str = "h100-sxm", **cluster: Any) -> Any:
    return resolve(
        parse_job(
            {
                "model": model,
                "data": {"source": "synthetic", "seq_len": seq},
                "train": {"global_batch": batch},
                "cluster": {"device": device, "nodes": nodes, "devices_per_node": 8, **cluster},
            }
        )
    )


def estimator_of(job: Any, memory_gib: float | None = None) -> Estimator:
    start = start_plan(job)
    return make_estimator(start.job, start.plan, start.world, start.device, memory_gib or start.memory_gib)


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(["tiny", "llama-8b", "moe-tiny", "qwen3-30b-a3b", "gpt2-125m", "mlp"]),
    world=st.integers(1, 48),
    batch=st.integers(1, 64),
)
def test_the_product_of_degrees_is_the_world(model: str, world: int, batch: int) -> None:
    seq = 1024
    job = resolve(
        parse_job({"model": model, "data": {"source": "synthetic", "seq_len": seq}, "train": {"global_batch": batch}})
    )
    space = job_space(job, world, "bf16")
    layouts = all_layouts(space)
    assert len(layouts) == count(space, coarse(space))
    assert (layouts.world == world).all()
    assert (layouts.dp * layouts.microbatch * layouts.accumulation == batch).all()
    assert ((layouts.dp_shard * layouts.cp * layouts.tp) % layouts.ep == 0).all()
    assert ((layouts.zero > 0) == (layouts.dp_shard > 1)).all()
    if job.model.heads:
        assert all(heads_fit(job.model, int(tp)) for tp in np.unique(layouts.tp))
        assert (layouts.pp * layouts.virtual_stages <= job.model.layers + 2).all()
    else:
        units = np.where(layouts.tp > 1, -(-job.model.layers // 2), job.model.layers)  # tp cuts layers in pairs
        assert (layouts.pp * layouts.virtual_stages <= units)[layouts.pp > 1].all()
    rows = np.stack([np.asarray(array, np.int64) for _, array in layouts.arrays()])
    assert len(np.unique(rows, axis=1).T) == len(layouts), "no layout stands twice"


@pytest.mark.parametrize(
    ("model", "nodes", "batch", "seq", "device"),
    [
        ("llama-8b", 2, 32, 4096, "a100-sxm-40gb"),
        ("qwen3-30b-a3b", 2, 16, 4096, "l40s"),
        ("gpt2-1.5b", 3, 96, 1024, "v100-sxm-32gb"),
        ("llama-13b", 2, 24, 8192, "h100-sxm"),
    ],
)
def test_the_search_finds_what_looking_at_everything_finds(
    model: str, nodes: int, batch: int, seq: int, device: str
) -> None:
    job = job_of(model, nodes, batch, seq, device)
    estimator = estimator_of(job)
    space = job_space(job, nodes * 8, "bf16").restricted(by_block=False)
    layouts = all_layouts(space)
    parts = [estimator.estimate(layouts.take(slice(a, a + 16_384))) for a in range(0, len(layouts), 16_384)]
    times = np.concatenate([np.where(p.fits, p.step_time_s, np.inf) for p in parts])
    selective = layouts.recompute == RECOMPUTES.index("selective")
    times[selective & SPLITS[layouts.schedule] & (layouts.pp > 1)] = np.inf  # refused
    peaks = np.concatenate([p.peak_gib for p in parts])
    found = find_layouts(space, estimator, top=3, front=True)
    assert found.size == len(layouts)
    assert found.times.min() == pytest.approx(times.min(), rel=1e-12)
    assert _front(found.times, found.peaks) == pytest.approx(_front(times, peaks))
    assert found.times[0] <= (1 + 1.2 * TIME_TOLERANCE) * times.min(), "the plainest of the equally fast is first"


def _front(times: Any, peaks: Any) -> list[float]:
    order = np.lexsort((peaks, times))
    order = order[times[order] <= 2 * times.min()]
    low = np.minimum.accumulate(peaks[order])
    return [float(t) for t in times[order][np.concatenate([[True], low[1:] < low[:-1]])]]


def test_recompute_by_block_is_only_as_much_as_memory_asks_for() -> None:
    """Where nothing else helps, some blocks are recomputed: faster than all of them, and no more would be needed."""
    job = job_of("llama-8b", 1, 8, 8192, "a100-sxm-40gb")
    space = job_space(job, 8, "bf16").restricted(pp=(1,), cp=(1,), tp=(1,), zero=(3,), dp_shard=(8,), microbatch=1)
    estimator = estimator_of(job)
    whole, some = find_layouts(space.restricted(by_block=False), estimator), find_layouts(space, estimator)
    blocks = int(some.layouts.recompute_blocks[0])
    assert 0 < blocks < 32
    assert some.times[0] < whole.times[0]
    assert some.layouts.plan(0).recompute == blocks
    fewer = Layouts.of(**{**dict(some.layouts.take([0]).arrays()), "recompute_blocks": blocks - 1})
    assert not estimator.estimate(fewer).fits[0]


@settings(max_examples=10, deadline=None)
@given(less=st.floats(12, 140), more=st.floats(0, 100))
def test_more_memory_never_makes_a_fitting_plan_unfit(less: float, more: float) -> None:
    job = job_of("llama-8b", 2, 32, 2048)
    space = job_space(job, 16, "bf16").restricted(schedules=(("1f1b", (1,)), ("zbv", (2,))), cp=(1,))
    layouts = all_layouts(space)
    small, large = (estimator_of(job, memory_gib=gib) for gib in (less, less + more))
    assert (~small.estimate(layouts).fits | large.estimate(layouts).fits).all()
    first, second = find_layouts(space, small), find_layouts(space, large)
    if len(first):
        assert second.times.min() <= first.times.min() * (1 + 1e-12)


def test_symmetric_clusters_give_symmetric_answers() -> None:
    """Where all links are the same, it does not matter how ranks are gathered in nodes."""
    flat = [{"name": "flat", "size": 16, "gb_s": 50, "latency_us": 5}]
    two, four = (job_of("llama-8b", n, 32, levels=flat, devices_per_node=16 // n) for n in (2, 4))
    found = [find_layouts(job_space(job, 16, "bf16"), estimator_of(job), top=4) for job in (two, four)]
    assert [f.layouts.plan(int(i)).layout() for f in found[:1] for i in f.best(4)] == [
        found[1].layouts.plan(int(i)).layout() for i in found[1].best(4)
    ]
    assert found[0].times.min() == pytest.approx(found[1].times.min(), rel=1e-12)


def test_layouts_go_to_plans_and_back() -> None:
    plan = Plan(
        device="cuda", device_name="h100-sxm", backend="nccl", dp_shard=4, tp=2, pp=2, sequence=True, precision="bf16",
        schedule="zbv", virtual_stages=2, microbatch=2, accumulation=8, recompute="full", zero=2,
    )  # fmt: skip
    one = Layouts.one(plan)
    assert len(one) == 1 and int(one.world[0]) == plan.world == 16
    assert one.plan(0, plan) == plan
    assert len(Layouts.join([one, one.take([0, 0])])) == 3


@pytest.mark.parametrize(
    ("model", "nodes", "device", "seq", "batch", "cut", "data"),
    [
        ("llama-1b", 1, "h100-sxm", 4096, 256, (1, 1), 8),
        ("llama-8b", 8, "h100-sxm", 8192, 512, (1, 2), 32),
        ("llama-13b", 8, "a100-sxm-80gb", 4096, 512, (1, 8), 8),
        ("llama-70b", 16, "h100-sxm", 4096, 1024, (1, 64), 2),
        ("gpt3-175b", 128, "a100-sxm-80gb", 2048, 1536, (16, 128), 4),
        ("llama-405b", 256, "h100-sxm", 8192, 2048, (64, 1024), 2),
        (
            {"family": "gpt2", "dim": 25600, "layers": 128, "heads": 160, "vocab": 51200, "max_len": 2048},
            512, "h100-sxm", 2048, 3072, (128, 2048), 2,
        ),
    ],
)  # fmt: skip
def test_rules_of_thumb_come_out_of_the_search(
    model: Any, nodes: int, device: str, seq: int, batch: int, cut: tuple[int, int], data: int
) -> None:
    """Below 10B data parallelism alone; to 100B the model is cut a little or sharded; above that tp, pp and dp at
    once, and the more so the larger. tp never leaves the node."""
    start = start_plan(job_of(model, nodes, batch, seq, device))
    plan, _, found = pick_layout(start)
    assert found is not None and len(found)
    assert cut[0] <= plan.tp * plan.pp <= cut[1], plan.layout()
    assert plan.dp >= data
    assert plan.tp <= 8
    if cut[0] >= 16:
        assert plan.tp > 1 and plan.pp > 1


def test_experts_are_spread_by_the_search() -> None:
    start = start_plan(job_of("mixtral-8x7b", 8, 1024, 4096))
    plan, reasons, found = pick_layout(start)
    assert found is not None and plan.ep > 1
    assert any(reason.startswith(f"ep {plan.ep}: without it a step would be") for reason in reasons)


def test_pinned_layouts_stay_pinned_and_the_rest_is_chosen() -> None:
    job = job_of("llama-8b", 1, 64, 8192, "a100-sxm-40gb")
    pinned = job.model_copy(update={"parallel": parse_job({"parallel": {"tp": 2, "zero": 3}}).parallel})
    _, plan = make_plan(pinned)
    assert plan.layout() == "dp_shard 4 (zero 3) × tp 2"
    assert plan.recompute != "none", "keeping every activation would not fit"
    [reason] = [reason for reason in plan.reasons if reason.startswith("recompute ")]
    blocks = " blocks" if isinstance(plan.recompute, int) else ""
    assert reason.startswith(f"recompute {plan.recompute}{blocks}: with less the same layout would need")


@pytest.mark.parametrize("style", [None, "ring", "ulysses", "hybrid"])
def test_every_style_of_context_parallelism_can_be_pinned(style: str | None) -> None:
    """Also where key and value heads are replicated, which the search itself does not consider."""
    pinned = {"dp_shard": 1, "cp": 4, **({"cp_style": style} if style else {})}
    job = parse_job({"model": {"shape": "tiny"}, "data": {"source": "synthetic", "seq_len": 64},
                     "train": {"global_batch": 16}, "cluster": {"device": "cpu"}, "parallel": pinned})  # fmt: skip
    found = survey(start_plan(job, 4))
    assert found.plan.cp == 4 and found.plan.cp_style == (style or found.plan.cp_style)
