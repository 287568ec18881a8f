"""A run whose states live in host memory or on disk is the resident run, bit for bit, with late copies and faults."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tier_ranks
from helpers.parity import make_job, section

from weft.hardware.probe import usable_memory
from weft.job.errors import FitError, MachineError
from weft.memory.disk_states import DiskFile, DiskStates
from weft.memory.host_memory import allocate_host
from weft.memory.split_master import join, split_
from weft.mesh import connect
from weft.optim.pieces import assign_homes, cut_slices
from weft.optim.streamed_optimizer import StreamedOptimizers
from weft.planner import make_plan

CASES: dict[str, tuple[str, ...]] = {
    "adamw": ("precision=bf16", "train.accumulation=1", "memory.recompute=full", "model.tied=true"),
    "sgd": ("precision=bf16", "train.ema=0.9"),
    "muon": ("precision=bf16", "train.ema=0.9", "memory.recompute=1"),
    "adafactor": ("precision=fp32", "optim.clip=0", "model.tied=true"),
    "lars": ("precision=bf16",),
    "lamb": ("precision=bf16", "train.ema=0.9"),
}
"""Settings that go with each optimizer, so that all of them occur."""


@pytest.mark.parametrize("name", CASES)
def test_states_elsewhere_change_no_bit(name: str, tmp_path: Path) -> None:
    """Clipping fires (0.5), one step is not finite, copies are late, and memory that was stored is overwritten."""
    job, plan = make_plan(make_job(f"optim.name={name}", *CASES[name], parallel=section("1")), 1)
    mesh = connect(plan)
    split = plan.precision == "bf16"
    averaged = job.train.ema > 0  # evaluations are of the averages, which change places with the weights
    resident = tier_ranks.run(job, plan, mesh, not_finite=1, evaluate=averaged)
    for changes in (
        {"host_share": 1.0}, {"host_share": 0.5, "disk_share": 0.5}, {"host_share": 0.0, "split_master": True},
    ):  # fmt: skip
        changed: dict[str, Any] = {"split_master": split, "disk": str(tmp_path), **changes}
        if not split and changes.get("split_master"):
            continue
        tiered = tier_ranks.run(job, replace(plan, **changed), mesh, not_finite=1, evaluate=averaged)
        assert isinstance(tiered.state.optimizers, StreamedOptimizers)
        assert resident.differences(tiered) == [], changed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        ("precision=fp32", "optim.name=sgd"),
        ("precision=bf16", "train.accumulation=1", "memory.recompute=full", "train.ema=0.9"),
    ],
)
def test_weights_and_gradients_elsewhere_change_no_bit(settings: tuple[str, ...]) -> None:
    """Blocks visit the device for each pass. Two are there at a time, so a pass that turns around keeps two. Gradients
    are fetched for each sum after the first and for the update."""
    job, plan = make_plan(make_job("model.layers=5", *settings, parallel=section("1")), 1)
    mesh, split = connect(plan), plan.precision == "bf16"
    resident = tier_ranks.run(job, plan, mesh, 3, not_finite=1)
    tiered = tier_ranks.run(
        job, replace(plan, weight_share=1.0, gradient_home="host", split_master=split), mesh, 3, not_finite=1
    )
    assert resident.differences(tiered) == []
    optimizers = tiered.state.optimizers
    assert isinstance(optimizers, StreamedOptimizers)
    weights = optimizers.weights.stream
    sizes = [weights.units[f"blocks.{i}"].bytes() for i in range(5)]
    passes = 3 * plan.accumulation
    moved = {key[1:]: size for key, size in optimizers.moved.items() if key[0] == "weights"}
    assert moved["host", "device", "forward"] == passes * sum(sizes[2:]) + sum(sizes[:2])
    assert moved["host", "device", "backward"] == passes * sum(sizes[:3])
    assert moved["device", "host", "forward"] == moved["device", "host", "settle"] == sum(sizes)
    here = sum(t.untyped_storage().nbytes() for unit in weights.units.values() for t in unit.here.values())
    assert here == sizes[4] + sizes[0]
    assert optimizers.gradients is not None
    size = sum(t.numel() * t.element_size() for t in optimizers.gradients.host.values())
    assert size == sum(sizes)
    assert {key[1:]: moved // size for key, moved in optimizers.moved.items() if key[0] == "gradients" and moved} == {
        ("device", "host", "backward"): passes, ("host", "device", "forward"): 1, ("host", "device", "settle"): 1,
        **({("host", "device", "backward"): passes - 3} if passes > 3 else {}),
    }  # fmt: skip
    assert all(leaf.grad is None for n, leaf in optimizers.grad_params.items() if n in optimizers.gradients.host)


@pytest.mark.parametrize(
    ("settings", "changes", "elsewhere"),
    [
        (("precision=bf16", "optim.name=adafactor", "memory.recompute=full"),
         {"split_master": True, "states": "24bit-master"}, {"host_share": 1.0, "weight_share": 0.6}),
        (("precision=fp32", "model.tied=true"), {}, {"host_share": 0.5, "disk_share": 0.5}),
        (("precision=bf16", "optim.name=muon", "train.ema=0.9"), {}, {"weight_share": 1.0}),
    ],
)  # fmt: skip
def test_updates_in_the_backward_pass_change_no_bit(
    settings: tuple[str, ...], changes: dict[str, Any], elsewhere: dict[str, Any], tmp_path: Path
) -> None:
    """Gradients are consumed unit by unit; a step whose loss is not finite is skipped as a whole."""
    given = ("model.layers=5", "optim.clip=0", "optim.lr=0.01", "train.accumulation=1", *settings)
    job, plan = make_plan(make_job(*given, parallel=section("1")), 1)
    mesh = connect(plan)
    resident = tier_ranks.run(job, replace(plan, **changes), mesh, not_finite=1)
    released = replace(plan, gradient_home="released", disk=str(tmp_path), **changes, **elsewhere)
    tiered = tier_ranks.run(job, released, mesh, not_finite=1)
    assert resident.differences(tiered) == []
    optimizers = tiered.state.optimizers
    assert isinstance(optimizers, StreamedOptimizers) and optimizers.released is not None
    held = [n for n, leaf in optimizers.grad_params.items() if leaf.grad is not None]
    assert held and not any(n.startswith("blocks.") for n in held)
    moved = {(kind, phase) for kind, _, _, phase in optimizers.moved}
    assert "gradients" not in {kind for kind, _ in moved} and {phase for _, phase in moved} >= {"backward"}


def test_resume_from_the_other_kind(tmp_path: Path) -> None:
    job, plan = make_plan(make_job("model.layers=3", "precision=bf16", "train.ema=0.9", parallel=section("1")), 1)
    mesh = connect(plan)
    tiered = replace(
        plan, split_master=True, host_share=0.6, disk_share=0.4, disk=str(tmp_path), weight_share=1.0
    )  # fmt: skip
    whole = tier_ranks.run(job, plan, mesh, 4)
    for first, second in ((plan, tiered), (tiered, plan), (tiered, replace(tiered, host_share=1.0, disk_share=0.0))):
        half = tier_ranks.run(job, first, mesh, 2)
        rest = tier_ranks.run(job, second, mesh, 2, start=half.state)
        assert half.figures + rest.figures == whole.figures
        assert [n for n, t in whole.tensors.items() if not torch.equal(t, rest.tensors[n])] == []


def test_layouts(world: Callable[[int], Callable[..., list[Any]]], tmp_path: Path) -> None:
    host, disk = {"host_share": 1.0}, {"disk_share": 0.5, "host_share": 0.25}
    weights = {"host_share": 0.5, "weight_share": 1.0}
    for optimizer, layout, changes in (
        ("adamw", "dp_shard=2 zero=3", disk), ("muon", "dp_shard=2 zero=1", host), ("adafactor", "tp=2", weights),
        ("sgd", "pp=2", weights), ("adamw", "dp_replicate=2", weights), ("lamb", "dp_shard=2 zero=2", disk),
    ):  # fmt: skip
        layers = "model.layers=3" if changes is weights else "model.layers=2"
        job = make_job(f"optim.name={optimizer}", "precision=bf16", "train.ema=0.9", layers, parallel=section(layout))
        found = world(2)(tier_ranks.compare, make_plan(job), changes, str(tmp_path))
        assert found == [[], []], layout


def test_bytes_moved_are_those_of_the_states() -> None:
    """Each way, in each step: 2 bytes of the low half, 8 of AdamW's moments and 4 of the average for each element of a
    matrix. The last update is applied when the run is read."""
    job, plan = make_plan(make_job("precision=bf16", "train.ema=0.9", parallel=section("1")), 1)
    ran = tier_ranks.run(job, replace(plan, split_master=True, host_share=1.0), connect(plan), 3, late=False)
    optimizers = ran.state.optimizers
    assert isinstance(optimizers, StreamedOptimizers)
    elements = sum(m.numel() for m in optimizers.master_params.values() if m.dim() > 1)
    each = {"master": 2 * elements, "moments": 8 * elements, "average": 4 * elements}
    expected = {
        (kind, *way, phase): steps * size
        for kind, size in each.items()
        for way in (("host", "device"), ("device", "host"))
        for phase, steps in (("forward", 2), ("settle", 1))
    }
    assert dict(optimizers.moved) == expected
    report = optimizers.tier_report()
    assert {(r["kind"], r["from"], r["to"], r["phase"]): r["bytes"] for r in report["moved"]} == expected
    assert report["updates"] == 3 and 0 <= report["hidden"] <= 1 and report["copy_s"] > 0


def test_weights_are_cut_by_aligned_rows() -> None:
    params = {"a": torch.empty(100, 8), "b": torch.empty(3, 4), "c": torch.empty(7), "d": torch.empty(64, 8)}
    pieces = cut_slices(params, params, lambda name: name != "d", 256)
    assert [[part.key for part in piece] for piece in pieces] == [
        ["a[0:32]"], ["a[32:64]"], ["a[64:96]"], ["a[96:100]", "b", "c"], ["d"],
    ]  # fmt: skip


def test_pieces_of_large_weights_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = make_plan(make_job("precision=bf16", "train.ema=0.9", parallel=section("1")), 1)
    mesh = connect(plan)
    resident = tier_ranks.run(job, plan, mesh)
    make = tier_ranks.streamed.Tiering
    monkeypatch.setattr("weft.training.build.Tiering", lambda *args: make(*args, piece_elements=300))
    tiered = tier_ranks.run(job, replace(plan, split_master=True, host_share=0.7), mesh)
    assert resident.differences(tiered) == []
    assert len(tiered.state.optimizers.pieces) > 10  # type: ignore[attr-defined]


def test_homes_are_spread_evenly() -> None:
    sizes = {str(i): 10 for i in range(10)}
    assert list(assign_homes(sizes, {}).values()) == ["device"] * 10
    found = list(assign_homes(sizes, {"host": 0.5, "disk": 0.2}).values())
    assert (found.count("host"), found.count("disk")) == (5, 2)
    assert "host" in found[:3] and "host" in found[-3:]


def test_a_split_weight_is_exact_at_ties_and_for_every_sign() -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    ties = (bits[:1024] // 65536) * 65536 + 0x8000
    masters = torch.cat([bits, ties]).to(torch.int32).view(torch.float32)
    high, low = torch.empty_like(masters, dtype=torch.bfloat16), torch.empty_like(masters, dtype=torch.int16)
    split_(masters, high, low)
    assert torch.equal(join(high, low).view(torch.int32), masters.view(torch.int32))
    finite = masters.isfinite() & (masters.abs() < 3e38)
    nearest = (masters.double() - high.double()).abs() <= (masters.double() - masters.bfloat16().double()).abs()
    assert nearest[finite].all()


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FitError, match=r"cannot hold 0\.00 GiB of states \(No space left on device\)"):
        DiskFile(tmp_path / "states.bin", 1 << 20)


def test_host_memory_that_others_have_taken_is_refused() -> None:
    more = int((usable_memory()[1] + 1) * 2**30)
    with pytest.raises(
        FitError, match=r"GiB of host memory are needed .*, and \d+\.\d\d GiB are available now; end what"
    ):
        allocate_host([((more,), torch.uint8)], torch.device("cpu"), more)


def test_a_truncated_file_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    states = DiskStates.make(tmp_path, 0, [[8192], [4096]], torch.device("cpu"))
    states.write(1, 0, torch.arange(4096, dtype=torch.int32)[:1024])
    assert states.read(1, 0).view(torch.int32).tolist() == list(range(1024))
    assert states.file is not None
    os.ftruncate(states.file.file, 8192)
    with pytest.raises(MachineError, match="ends at 8192 of 12288 bytes: it was truncated"):
        states.read(1, 0)


def test_a_failed_write_in_the_background_is_raised_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, plan = make_plan(make_job("precision=bf16", parallel=section("1")), 1)
    plan = replace(plan, split_master=True, disk_share=1.0, disk=str(tmp_path))

    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    state = tier_ranks.run(job, plan, connect(plan), 1).state
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(MachineError, match=r"cannot be written at .*: Input/output error"):
        tier_ranks.run(job, plan, connect(plan), 2, start=state)


def test_homes_of_a_kind_can_be_pinned(tmp_path: Path) -> None:
    """Half of the moments on disk, the averages in host memory, and the low halves on the device: the same run."""
    homes = {"moments": {"disk": 0.5}, "averages": "host", "master": "device"}
    memory = {"offload": "states", "homes": homes, "disk": str(tmp_path), "host_gib": 1}
    job, plan = make_plan(make_job("precision=bf16", "train.ema=0.9", memory=memory, parallel=section("1")), 1)
    states = [(row["kind"], row["home"]) for row in plan.homes if row["kind"] not in ("weights", "gradients")]
    assert sorted(states) == [
        ("averages", "host"), ("low halves", "device"), ("moments", "device"), ("moments", "disk"),
    ]  # fmt: skip
    resident = tier_ranks.run(job, replace(plan, home_shares={}, host_share=0.0, split_master=False), connect(plan))
    pinned = tier_ranks.run(job, plan, connect(plan))
    assert resident.differences(pinned) == []
    optimizers = pinned.state.optimizers
    assert isinstance(optimizers, StreamedOptimizers)
    matrices = sum(m.numel() for m in optimizers.master_params.values() if m.dim() > 1)
    moved: Counter[tuple[str, str]] = Counter()
    for (kind, source, target, _), size in optimizers.moved.items():
        moved[kind, source] += size if target == "device" else 0
    assert {key for key, size in moved.items() if size} == {("moments", "disk"), ("average", "host")}
    assert moved["average", "host"] == 4 * 4 * matrices
