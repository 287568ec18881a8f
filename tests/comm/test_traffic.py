"""Bytes by link, FSDP2's messages on their axes, and communication of a timed step in metrics and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import parity
from helpers.on_ranks import begin
from torch import Tensor

from weft.comm import algorithms
from weft.comm.axis import Axis, Tally
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.mesh import connect
from weft.planner.plan import Plan
from weft.training.figures.comm_metrics import CommMetrics
from weft.watch.figures.steps import figures
from weft.watch.journal import Journal
from weft.watch.report import write_report

WORLD, NEAR = 4, 2
Counted = dict[str, Tally]


def by_link() -> dict[str, dict[str, Tally]]:
    """Two nodes of two ranks each, as the plan says; what each axis counts as inside and between."""
    mesh = connect(Plan("cpu", "cpu", "gloo", nodes=2, dp_replicate=2, tp=2))
    assert mesh.everyone is not None
    x, n = torch.ones(WORLD, 6), mesh.world
    for axis in (mesh.everyone, mesh.axes["tp"], mesh.axes["dp_replicate"]):
        axis.all_reduce(x.clone())
        axis.all_to_all(x[: axis.size], range(axis.size))
        axis.scatter(x[: axis.size] if axis.rank == 0 else None, torch.empty(6), 0)
        axis.gather(x, 0)
    mesh.everyone.start_exchange([((mesh.rank + 2) % n, x)], [((mesh.rank - 2) % n, x.clone())]).wait()
    found = {axis.name: axis.read() for axis in mesh.every_axis()}
    mesh.everyone.reset()
    algorithms.all_reduce(mesh.everyone, torch.ones(80), "hierarchical", near=NEAR)
    found["hierarchical"] = mesh.everyone.read()
    return found


def test_bytes_inside_a_node_and_between_nodes(pool: RankPool) -> None:
    for rank, output in enumerate(pool.run(by_link, WORLD)):
        size, row = 4 * WORLD * 6, 4 * 6
        tp, across, everyone = output["tp"], output["dp_replicate"], output["everyone"]
        assert all(t.between == 0 for t in tp.values())  # neighbours share a node
        assert all(t.between == t.bytes for t in across.values())
        assert everyone["all_reduce"] == Tally(1, size, size * (rank in (1, 3)))  # the ring leaves a node there
        assert everyone["all_to_all"] == Tally(1, 3 * row, 2 * row)
        assert everyone["scatter"] == Tally(1, 3 * row * (rank == 0), 2 * row * (rank == 0))
        assert everyone["gather"] == Tally(1, size * (rank != 0), size * (rank >= NEAR))
        assert everyone["send"] == Tally(1, size, size)
        # two levels: of 2 (n - 1) / n of the tensor only 2 (n - g) / n / g leave the node
        sent = output["hierarchical"]["send"]
        assert (sent.bytes, sent.between) == (4 * 80 * 6 // 4, 4 * 80 * 2 * (4 - 2) // 4 // 2)


def watched(job: Job) -> tuple[list[dict[str, float]], dict[str, Counted], bool]:
    """Two steps, of which the second is timed: its figures and the counters of the axes."""
    job, _, mesh, stepper, loader = begin(job)
    comm = CommMetrics(mesh, 2)
    found: list[dict[str, float]] = []
    counts: dict[str, Counted] = {}
    for step, batches in zip(range(2), loader, strict=False):
        comm.next_step(step)
        for axis in mesh.every_axis():
            axis.reset()
        stepper.update(stepper.gradients(batches), stepper.learning_rate())
        counts = {axis.name: axis.read() for axis in mesh.axes.values()}
        found.append(comm.figures(comm.timeline, 1.0))
    comm.next_step(2)
    return found, counts, mesh.meter.timeline is None


def weights_of(job: Job) -> Tensor:
    from weft.models.build_model import build_model
    from weft.planner import make_plan

    return torch.tensor(sum(p.numel() for p in build_model(make_plan(job)[0].model, 0).parameters()))


def test_figures_of_a_timed_step(pool: RankPool) -> None:
    for layout, axis, kinds in (
        ({"dp_replicate": 2, "dp_shard": 1}, "dp_replicate", {"all_reduce"}),
        ({"dp_shard": 2, "zero": 3}, "dp_shard", {"all_gather", "reduce_scatter"}),
        ({"dp_shard": 1, "tp": 2}, "tp", {"all_gather", "reduce_scatter"}),
    ):
        job = parity.make_job(train={"accumulation": 1}, parallel=layout)
        for found, counts, quiet in pool.run(watched, 2, job):
            assert quiet and found[0] == {}
            assert found[1].keys() == {"comm_share", "exposed_share", "comm_mib", "comm_gb_per_s", "comm_axes"}
            assert found[1]["comm_axes"][axis]["ranks"] == 2 and found[1]["comm_axes"][axis]["shortest_ms"] > 0
            assert 0 <= found[1]["exposed_share"] <= found[1]["comm_share"] <= 1
            assert found[1]["comm_gb_per_s"] > 0 and found[1]["comm_share"] > 0
            assert kinds <= counts[axis].keys()
            output = sum(t.bytes for t in counts[axis].values()) / 2**20
            assert (
                output <= found[1]["comm_mib"] < output + 0.01
            )  # the count, the norm and the figures travel over everyone
            if axis == "dp_shard":  # each rank hands over its half twice, forward and backward, and all gradients once
                size = 4 * int(weights_of(job))
                assert counts[axis]["reduce_scatter"].bytes == size


def test_communication_figures_in_the_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    journal = Journal(run)
    records: list[dict[str, Any]] = []
    for step in range(1, 31):
        seen = {"comm_share": 0.3, "exposed_share": 0.1, "comm_gb_per_s": 1.5, "comm_mib": 8.0, "comm_between_mib": 2.0}
        records.append({"step": step, "loss": 1.0, **(seen if step % 10 == 0 else {})})
        journal.metrics(records[-1])
    drawn = {f.id: f for f in figures(records, [], {})}
    assert [t["name"] for t in drawn["traffic"].data] == ["all", "exposed"]
    assert drawn["traffic"].data[0]["x"] == [10, 20, 30]
    assert drawn["speed"].caption == "8 MiB a step from rank 0, 2 MiB of it to other nodes"
    assert "Communication" in write_report(run).read_text(encoding="utf-8")
    assert "traffic" not in {f.id for f in figures([{"step": 1, "loss": 1.0}], [], {})}


def test_one_node_counts_no_bytes_between_nodes() -> None:
    axis = Axis("x", None, 2, 0)  # type: ignore[arg-type]
    axis.count("all_reduce", torch.ones(3))
    assert axis.read() == {"all_reduce": Tally(1, 12, 0)}
    assert not dist.is_initialized()
