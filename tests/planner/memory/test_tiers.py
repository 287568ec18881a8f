"""Homes of states: what auto chooses, what is refused, and with which sentence."""

from __future__ import annotations

from typing import Any

import pytest

from weft.job import parse_job
from weft.job.errors import FitError, JobError
from weft.planner import make_plan


def job(memory: dict[str, Any], **more: Any) -> Any:
    return parse_job({
        "model": {"shape": "llama-8b"}, "data": {"source": "synthetic", "seq_len": 4096},
        "train": {"global_batch": 4, "microbatch": 4},
        "cluster": {"device": "h200-sxm", "nodes": 1, "devices_per_node": 1}, "precision": "bf16",
        "memory": memory, **more,
    })  # fmt: skip


def test_auto_offloads_only_what_does_not_fit() -> None:
    _, resident = make_plan(job({"offload": "auto"}))
    assert (resident.offload, resident.tiered, resident.homes) == ("none", False, ())
    _, small = make_plan(job({"offload": "auto", "device_gib": 90, "host_gib": 80}))
    assert small.offload == "states" and small.split_master and 0 < small.host_share < 1
    assert small.predicted["memory_gib"] <= 90
    moved = sum(row["moved_gib"] for row in small.homes)
    assert moved == pytest.approx(sum(row["gib"] for row in small.homes if row["home"] == "host"), rel=1e-3)


def test_states_are_ten_bytes_a_parameter() -> None:
    _, plan = make_plan(job({"offload": "states", "host_gib": 100}))
    host = {row["kind"]: row["gib"] * 2**30 / 8.03e9 for row in plan.homes if row["home"] == "host"}
    assert host == pytest.approx({"low halves": 2, "moments": 8}, rel=1e-3)


def test_what_is_refused() -> None:
    with pytest.raises(FitError, match=r"need 74\.79 GiB of host memory a rank, and 20\.00 GiB may be used"):
        make_plan(job({"offload": "states", "offload_fraction": 1.0, "host_gib": 20}))
    with pytest.raises(JobError, match=r"memory\.offload_fraction=0\.5 has no effect with memory\.offload=none"):
        make_plan(job({"offload_fraction": 0.5}))
    with pytest.raises(JobError, match=r"memory\.split_master=true .* not with precision=fp32"):
        make_plan(job({"split_master": True}, precision="fp32"))
