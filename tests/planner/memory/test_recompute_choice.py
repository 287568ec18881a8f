"""The plan keeps as much as fits, and says what fp8 is measured against."""

from __future__ import annotations

from typing import Any

import pytest

from weft.job import parse_job
from weft.job.errors import FitError
from weft.planner import Plan, make_plan
from weft.planner.describe import describe_plan
from weft.planner.model.fp8 import blended_peak, fp8_share
from weft.planner.model.reference_rate import peak_flops


def planned(**sections: Any) -> tuple[Any, Plan]:
    job = {
        "model": "llama-1b", "data": {"source": "synthetic", "seq_len": 8192},
        "train": {"global_batch": 2, "microbatch": 2}, "cluster": {"device": "h200-sxm", "devices_per_node": 1},
    }  # fmt: skip
    return make_plan(parse_job({**job, **sections}))


def gib(option: str | int) -> float:
    return planned(memory={"recompute": option})[1].predicted["memory_gib"]


def test_each_option_keeps_less_than_the_one_before() -> None:
    options: list[str | int] = ["none", 1, 4, 12, "full"]
    needs = [gib(o) for o in options]
    assert needs[0] > gib("selective") > needs[-1]
    assert gib(0) == gib("none")
    assert sorted(needs[1:], reverse=True) == needs[1:]


def test_a_budget_chooses_the_least_that_fits() -> None:
    for budget in (gib("none"), gib("selective"), gib(6), gib("full")):
        _, plan = planned(memory={"budget_gib": budget * 1.001})
        assert plan.predicted["memory_gib"] <= budget * 1.001
        assert gib(plan.recompute) == plan.predicted["memory_gib"]
        cheaper: list[str | int] = ["none", "selective", *range(1, 16), "full"]
        assert all(gib(o) > budget * 1.001 for o in cheaper[: cheaper.index(plan.recompute)])
    assert plan.recompute == "full"
    assert "recompute full: with less the same layout would need" in plan.reasons[-1]
    with pytest.raises(FitError, match=r"memory.budget_gib=1 is less than the .* GiB a rank that even recompute=full"):
        planned(memory={"budget_gib": 1})
    small = {"device": "h200-sxm", "devices_per_node": 1, "memory_gib": 1}
    assert planned(memory={"budget_gib": 500}, cluster=small)[1].predicted["memory_gib"] > 1  # no budget is too small


def test_a_device_that_is_too_small_recomputes() -> None:
    assert planned()[1].recompute == "none"
    _, plan = planned(cluster={"device": "h200-sxm", "devices_per_node": 1, "memory_gib": gib("selective") / 0.9 + 0.1})
    assert plan.recompute == "selective"
    _, plan = planned(
        cluster={"device": "h200-sxm", "devices_per_node": 2, "memory_gib": 14},
        parallel={"pp": 2, "schedule": "zb-h1"}, train={"global_batch": 4},
    )  # fmt: skip
    assert isinstance(plan.recompute, int) or plan.recompute == "full"


def test_fp8_is_measured_against_the_peaks_of_what_it_multiplies() -> None:
    job, plan = planned(precision="fp8")
    share = fp8_share(job, plan)
    assert share is not None and 0.8 < share < 0.9
    peak = peak_flops(plan, job)
    assert peak == pytest.approx(1e12 / (share / 1979 + (1 - share) / 989))
    assert f"mfu        FLOPs / (time × {peak / 1e12:.0f} TFLOP/s): {share:.0%} at the fp8 peak" in describe_plan(
        job, plan
    )
    assert blended_peak(2.0, 1.0, 0.0) == 1.0 and blended_peak(2.0, 1.0, 1.0) == 2.0
    without = [planned(precision="fp8", fp8=fp8) for fp8 in ({"head": False}, {"skip": ["head"]})]
    odd = planned(precision="fp8", model={"shape": "llama-1b", "vocab": 50257})
    for kept in (*without, odd):
        assert 0.5 < (fp8_share(*kept) or 0) < 0.8 and "with the head" not in describe_plan(*kept)
    skipping = planned(precision="fp8", fp8={"skip": ["*"]})
    assert fp8_share(*skipping) == 0.0 and peak_flops(skipping[1], skipping[0]) == pytest.approx(989e12)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_budget_chooses_the_layout_too() -> None:
    """On eight devices a smaller share may be a deeper cut."""
    cluster = {"device": "h200-sxm", "devices_per_node": 8}
    _, free = planned(cluster=cluster, train={"global_batch": 16})
    _, tight = planned(cluster=cluster, train={"global_batch": 16}, memory={"budget_gib": 20})
    assert free.predicted["memory_gib"] > 20 >= tight.predicted["memory_gib"]
    assert tight.layout() != free.layout()
