"""Homes of states: what auto chooses, what is refused, and with which sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from weft.job import parse_job
from weft.job.errors import FitError, JobError
from weft.planner import make_plan
from weft.planner.disk_space import check_checkpoint_space, endurance_line


def job(memory: dict[str, Any], **more: Any) -> Any:
    return parse_job({
        "model": {"shape": "llama-8b"}, "data": {"source": "synthetic", "seq_len": 4096},
        "train": {"global_batch": 4, "microbatch": 4},
        "cluster": {"device": "h200-sxm", "nodes": 1, "devices_per_node": 1}, "precision": "bf16",
        "memory": memory, **more,
    })  # fmt: skip


def test_auto_offloads_states_of_a_pinned_layout_of_several_ranks() -> None:
    several: dict[str, Any] = {"cluster": {"device": "h200", "devices_per_node": 2}, "parallel": {"dp_shard": 2}}
    several["train"] = {"global_batch": 4, "microbatch": 1}
    _, plan = make_plan(job({"offload": "auto", "device_gib": 45, "host_gib": 80}, **several))
    assert plan.offload in ("states", "all") and not plan.split_master


def test_auto_offloads_only_what_does_not_fit(tmp_path: Path) -> None:
    _, resident = make_plan(job({"offload": "auto", "disk": str(tmp_path), "disk_gib": 9}))
    assert (resident.offload, resident.tiered, resident.homes) == ("none", False, ())
    _, small = make_plan(job({"offload": "auto", "device_gib": 90, "host_gib": 80}))
    assert small.offload == "states" and small.split_master and 0 < small.host_share < 1
    assert small.predicted["memory_gib"] <= 90
    moved = sum(row["moved_gib"] for row in small.homes)
    assert moved == pytest.approx(sum(row["gib"] for row in small.homes if row["home"] == "host"), rel=1e-3)


def test_auto_offload_of_experts_keeps_whole_blocks() -> None:
    """Activations of blocks with experts cannot leave the device."""
    _, plan = make_plan(job({"offload": "auto", "device_gib": 74, "host_gib": 400}, model="deepseek-v3-16b"))
    assert plan.offload == "states"
    with pytest.raises(FitError, match=r"need .* GiB of host memory a rank"):
        make_plan(job({"offload": "auto", "device_gib": 74, "host_gib": 10}, model="deepseek-v3-16b"))


def test_states_are_ten_bytes_a_parameter() -> None:
    _, plan = make_plan(job({"offload": "states", "host_gib": 100}))
    host = {row["kind"]: row["gib"] * 2**30 / 8.03e9 for row in plan.homes if row["home"] == "host"}
    assert host == pytest.approx({"low halves": 2, "moments": 8}, rel=1e-3)


def test_writes_to_a_disk_stand_beside_its_endurance(tmp_path: Path) -> None:
    memory = {"offload": "states", "host_gib": 10, "disk": str(tmp_path), "disk_gib": 100, "disk_tbw": 500}
    _, plan = make_plan(job(memory))
    written = sum(row["moved_gib"] for row in plan.homes if row["home"] == "disk") * 2**30
    daily = written * 86400 / plan.predicted["step_time_s"]
    (line,) = [reason for reason in plan.reasons if "endurance" in reason]
    assert line.endswith(f"an endurance of 500 TB (memory.disk_tbw) lasts {500e12 / daily:,.0f} days")
    assert "usual for" in str(endurance_line(job({**memory, "disk_tbw": None}), plan, 1.0))
    with pytest.raises(JobError, match=r"memory\.disk_tbw=500 needs the folder that it is about"):
        make_plan(job({"offload": "states", "disk_tbw": 500}))


def test_a_checkpoint_that_the_disk_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"offload": "states", "host_gib": 10, "disk": str(tmp_path), "disk_gib": 100}
    made, plan = make_plan(job(memory, runs_dir=str(tmp_path)))
    size, states = 12 * 8.03e9 / 2**30, sum(row["gib"] for row in plan.homes if row["home"] == "disk")
    real = shutil.disk_usage(tmp_path)
    for free in (size - 1, size + states - 1, size + states + 1):
        usage = real._replace(free=int(free * 2**30))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        if free > size + states:
            check_checkpoint_space(made, plan)
            continue
        with pytest.raises(FitError, match=rf"of 89\.7\d GiB does not fit besides {states:.2f} GiB of states"):
            check_checkpoint_space(made, plan)


def test_pinned_homes_are_rows_of_the_plan(tmp_path: Path) -> None:
    memory = {"offload": "states", "homes": {"moments": {"host": 0.5}}, "host_gib": 80}
    _, plan = make_plan(job(memory))
    rows = {(row["kind"], row["home"]): row["gib"] * 2**30 / 8.03e9 for row in plan.homes}
    assert rows["moments", "host"] == pytest.approx(4, rel=1e-3) == pytest.approx(rows["moments", "device"], rel=1e-3)
    assert rows["low halves", "host"] == pytest.approx(2, rel=1e-3)
    for homes, message in (
        ({"moments": "disk"}, r"memory\.homes keeps moments on disk, but it needs memory\.disk=FOLDER"),
        ({"averages": "host"}, r"memory\.homes has averages, and this job has none: they come with train\.ema"),
        ({"moments": {"host": 0.8, "disk": 0.5}}, r"memory\.homes.*must be device, host, disk or shares"),
    ):
        with pytest.raises(JobError, match=message):
            make_plan(job({**memory, "homes": homes}))
    _, plan = make_plan(job({**memory, "offload": "auto"}))
    assert plan.offload == "states" and plan.home_shares == {"moments": {"host": 0.5}}
    with pytest.raises(
        FitError, match=r"memory\.homes keeps 59\.8\d GiB of states a rank in host memory, and 9\.00 GiB"
    ):
        make_plan(job({**memory, "homes": {"moments": "host"}, "host_gib": 9}))


def test_gradients_and_weights_leave_the_device_last() -> None:
    """Only what does not fit with all states elsewhere, weights in whole blocks; a pinned share is as asked for."""
    train = {"global_batch": 4, "microbatch": 1}
    memory = {"offload": "auto", "device_gib": 16, "host_gib": 180}
    _, plan = make_plan(job(memory, train=train))
    rows = {(row["kind"], row["home"]): row for row in plan.homes}
    assert plan.host_share == 1 and 0 < plan.weight_share < 1 and plan.predicted["memory_gib"] <= 16
    assert plan.weight_share * 32 == pytest.approx(round(plan.weight_share * 32))
    away, block = rows["weights", "host"], 2 * 218112000 / 2**30
    assert away["gib"] == pytest.approx(plan.weight_share * 32 * block, rel=1e-3)
    assert away["moved_gib"] == pytest.approx(2 * 4 * (away["gib"] - 2 * block), rel=1e-2)
    assert away["stored_gib"] == away["gib"] and "their weights as far as they do not fit" in plan.reasons[-1]
    grads = rows["gradients", "host"]
    assert grads["gib"] == pytest.approx(2 * 32 * block, rel=1e-3) and grads["moved_gib"] == pytest.approx(
        4 * grads["gib"]
    )
    _, most = make_plan(job({**memory, "device_gib": 60}, train=train))
    assert (most.weight_share, most.gradient_home) == (0, "device")
    _, half = make_plan(job({"offload": "states", "homes": {"weights": {"host": 0.5}}, "host_gib": 100}))
    assert (half.weight_share, half.gradient_home) == (0.5, "device")
    for homes, shards, message in (
        ({"weights": "disk"}, 1, r"weights live on the device or in host memory"),
        ({"weights": "host"}, 2, r"and parallel\.dp_shard=2 gathers them from shards"),
        ({"gradients": "host"}, 2, r"and 2 ranks sum or share gradients on the device"),
        ({"gradients": {"host": 0.5}}, 1, r"has shares of gradients, and all of them leave or none"),
    ):
        cluster = {"device": "h200-sxm", "nodes": 1, "devices_per_node": shards}
        with pytest.raises(JobError, match=message):
            make_plan(job({"offload": "states", "host_gib": 100, "homes": homes}, cluster=cluster,
                          parallel={"dp_shard": shards}))  # fmt: skip
    with pytest.raises(FitError, match=r"weights need \d+\.\d+ GiB of host memory a rank, and 8\.00 GiB may be used"):
        make_plan(job({"offload": "states", "homes": {"weights": "host"}, "host_gib": 8}))


def test_gradients_are_released_where_nothing_else_fits() -> None:
    """70B with Adafactor on one H200: blocks are updated in the backward pass, and some of their weights and all low
    halves live in host memory. The error of a job that clips names the setting."""
    large = {"model": {"shape": "llama-70b"}, "memory": {"offload": "auto", "states": "24bit-master", "host_gib": 110}}
    asked = job({}).model_dump(exclude_unset=True) | large
    plan = make_plan(parse_job(asked | {"optim": {"name": "adafactor", "clip": 0}}))[1]
    assert (plan.gradient_home, plan.accumulation, plan.microbatch) == ("released", 1, 4)
    assert 0 < plan.weight_share < 0.5 and plan.predicted["memory_gib"] < 131.42
    assert 16384 / plan.predicted["step_time_s"] > 600
    held = sum(row["gib"] for row in plan.homes if row["home"] == "host")
    assert 100 < held < 110 and not any(row["kind"] == "gradients" and row["home"] == "host" for row in plan.homes)
    with pytest.raises(FitError, match=r"; optim\.clip=0 would fit, with gradients that the backward pass consumes"):
        make_plan(parse_job(asked | {"optim": {"name": "adafactor"}}))


def test_what_is_refused() -> None:
    released = {"offload": "states", "homes": {"gradients": "released"}, "host_gib": 100}
    with pytest.raises(JobError, match=r"before the norm is known that optim\.clip=1 needs; clip=0 works"):
        make_plan(job(released))
    with pytest.raises(JobError, match=r"of one microbatch, and a step sums 4 microbatches; gradients: host would"):
        make_plan(job(released, optim={"clip": 0}, train={"global_batch": 4, "microbatch": 1}))
    with pytest.raises(JobError, match=r"memory\.homes.*gradients may be released"):
        job({**released, "homes": {"moments": "released"}})
    with pytest.raises(FitError, match=r"need 74\.79 GiB of host memory a rank, and 20\.00 GiB may be used"):
        make_plan(job({"offload": "states", "offload_fraction": 1.0, "host_gib": 20}))
    with pytest.raises(JobError, match=r"memory\.offload_fraction=0\.5 has no effect with memory\.offload=none"):
        make_plan(job({"offload_fraction": 0.5}))
    with pytest.raises(JobError, match=r"memory\.split_master=true .* not with precision=fp32"):
        make_plan(job({"split_master": True}, precision="fp32"))
