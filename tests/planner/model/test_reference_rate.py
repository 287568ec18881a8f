"""MFU of a plan and of its run refer to the same rate."""

from __future__ import annotations

import pytest

from weft.job import parse_job
from weft.planner.job_estimate import estimate_job, show_estimate
from weft.planner.make_plan import make_plan
from weft.planner.model.reference_rate import mfu_peak_flops, peak_flops, step_flops

JOB = {"model": {"dim": 64, "layers": 2, "heads": 2, "ffn": 128}, "data": {"source": "synthetic", "seq_len": 64}}


@pytest.mark.parametrize("cluster", [{"device": "cpu"}, {"device": "h100-sxm", "devices_per_node": 2}])
def test_a_step_as_long_as_planned_has_the_planned_mfu(cluster: dict[str, object]) -> None:
    job, plan = make_plan(parse_job({**JOB, "cluster": cluster}), 2)
    peak, seconds = mfu_peak_flops(plan, job), plan.predicted["step_time_s"]
    assert peak is not None
    assert step_flops(job) / (seconds * plan.world * peak) == pytest.approx(plan.predicted["mfu"])
    assert plan.predicted["mfu"] == pytest.approx(estimate_job(job, plan)["mfu"])
    assert (peak_flops(plan, job) is None) == (cluster["device"] == "cpu"), "a processor is not in the catalog"


def test_an_estimate_lists_no_part_of_memory_that_is_zero() -> None:
    """The runtime of a GPU is scratch of compiled blocks."""
    gpus = {"device": "h100-sxm", "devices_per_node": 2}
    shown = [
        show_estimate(estimate_job(*make_plan(parse_job({**JOB, "cluster": gpus, "train": {"compile": compiled}}), 2)))
        for compiled in (False, True)
    ]
    assert ["runtime" in text for text in shown] == [False, True]
