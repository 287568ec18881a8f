"""Replicas of snapshots in the memory of another node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.command import until

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.format import list_checkpoints
from weft.checkpoint.memory_snapshots import Snapshots
from weft.checkpoint.merge_snapshots import save_merged_snapshots, snapshot_layout
from weft.checkpoint.reader import load_full
from weft.checkpoint.snapshot_file import SnapshotLayout, find_sealed, own_tensors, read_table
from weft.checkpoint.snapshot_replication import (
    KEEP,
    ReplicaSender,
    ReplicaStore,
    ReplicationRequest,
    held_files,
    newest_complete,
    survives_node_loss,
)
from weft.job import parse_job
from weft.mesh import Mesh
from weft.planner import make_plan
from weft.planner.plan import Plan
from weft.supervisor.nodes.consensus import Decision, NodeRanks, keep_ranks_in_place
from weft.wire.channel import Channel
from weft.wire.listener import Listener

SECRET = b"0123456789abcdef0123456789abcdef"
AXES = {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1}


def test_another_node_keeps_the_newest_steps(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    keeper, notes = ReplicaStore(theirs), []

    def serve(channel: Channel) -> None:
        keeper.serve(channel, channel.receive(60)[0])

    listener = Listener(SECRET, serve, notes.append)
    request, kept = [ReplicationRequest(3, frozenset({4}), 1, listener.address, 1)], []
    rings = Snapshots(mine, 4)
    tensors = {"model.w": torch.arange(6.0).view(2, 3)}
    SnapshotLayout(4, 3, {"a": 1}, {"axes": AXES}, {"model.w": ([4, 3], [2, 0])}).write(mine)
    sender = ReplicaSender(mine, SECRET, lambda: request[0], kept.append, notes.append)
    for step in (1, 2, 3):
        request[0] = ReplicationRequest(3, frozenset({4}), 1, listener.address, step)
        rings.take(step, {n: t + step for n, t in tensors.items()}, {"step": step})
        rings.seal(step, {})
        until(lambda step=step: kept[-1:] == [step])
    sender.close()
    assert kept == [1, 2, 3]
    found = sorted(held_files(theirs / "held"))
    assert [(attempt, rank, step) for attempt, rank, step, _ in found] == [(3, 4, 2), (3, 4, 3)]
    assert len(found) == KEEP
    assert found[-1][3].read_bytes() == next(s for s in find_sealed(mine) if s.step == 3).path.read_bytes()
    entries, meta = read_table(found[-1][3])
    assert (meta["step"], entries[0][:3]) == (3, ("model.w", "float32", [2, 3]))
    assert SnapshotLayout.read(theirs / "held" / "3-4.json").boxes == {"model.w": ([4, 3], [2, 0])}
    keeper.forget(before=4)
    assert not held_files(theirs / "held")
    listener.close()
    assert notes == []


def test_replicated_steps_are_not_overwritten(tmp_path: Path) -> None:
    rings, tensors = Snapshots(tmp_path, 0), {"w": torch.zeros(3)}
    rings.wanted = lambda: (2, 4)
    for step in range(1, 30):
        rings.take(step, tensors, {})
        rings.seal(step, {})
    assert rings.held()[:2] == [2, 4]
    assert rings.held()[-1] == 29


@pytest.mark.parametrize("replicas", [True, False])
def test_residuals_of_a_lost_node_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: bool) -> None:
    """Two replicas on two nodes: the other node has the weights and, of the lost rank, a replica of what it held alone.
    A newer step without those residuals is not taken."""
    mine, lost = tmp_path / "mine", tmp_path / "lost"
    job, plan = make_plan(parse_job({"parallel": {"dp_replicate": 2}, "cluster": {"device": "cpu"}}), 2)
    keeper = ReplicaStore(mine)
    for rank, folder in enumerate((mine, lost)):
        folder.mkdir(exist_ok=True)
        ring = Snapshots(folder, rank)
        for step in (5, 6):
            shards = {
                "model.w": torch.full((3,), float(step)),
                f"residual.{rank}.w": torch.full((3,), 10.0 * step + rank),
                f"random.{rank}": torch.arange(5, dtype=torch.uint8),
            }
            ring.take(step, shards, {"step": step})
            ring.seal(step, {})
        layout = snapshot_layout(rank, 1, job, plan, shards)
        layout.write(folder)
    sent = own_tensors(next(s for s in find_sealed(lost) if s.step == 5).copy())
    if replicas:
        keeper._keep(1, layout, 5, bytearray(sent))
    checkpoints = Checkpointer(tmp_path / "saved", group=None, keep=2, keep_every=0, background=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    mesh = Mesh(0, 1, torch.device("cpu"), None, {}, None, None, None)
    step = save_merged_snapshots(mine, checkpoints, mesh, 1, newer_than=-1, residuals=True)
    assert step == (5 if replicas else 6)
    found = load_full(list_checkpoints(tmp_path / "saved")[-1])
    assert found["model.w"].tolist() == [float(step)] * 3
    residuals = {name: t[0].item() for name, t in found.items() if name.startswith("residual.")}
    assert residuals == ({"residual.0.w": 50.0, "residual.1.w": 51.0} if replicas else {"residual.0.w": 60.0})
    assert found["random.1"].numel() == (5 if replicas else torch.get_rng_state().numel())


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ([(7, 0), (7, 1), (7, 2), (7, 3), (8, 0), (8, 2)], 7),
        ([(7, 0), (7, 3), (8, 0), (8, 2)], 7),  # 0 and 2 are replicas, 1 and 3 too
        ([(7, 0), (8, 2)], None),
        ([(7, 0), (7, 9)], None),
        ([], None),
    ],
)
def test_newest_complete_step(held: list[tuple[int, int]], newest: int | None) -> None:
    assert newest_complete(held, AXES) == newest


def test_replicas_on_other_nodes_need_no_replication() -> None:
    def plan(**spread: int) -> Plan:
        return make_plan(parse_job({"parallel": spread, "cluster": {"device": "cpu"}}), 4)[1]

    halves = [range(0, 2), range(2, 4)]
    assert survives_node_loss(plan(dp_replicate=2, dp_shard=2), halves)
    assert survives_node_loss(plan(dp_replicate=4, dp_shard=1), [range(0, 3), range(3, 4)])
    assert not survives_node_loss(plan(dp_replicate=1, dp_shard=4), halves)
    assert not survives_node_loss(plan(dp_replicate=2, dp_shard=1, tp=2), [range(0, 3), range(3, 4)])


def test_nodes_keep_their_ranks_where_they_can() -> None:
    before = Decision(1, 0, (NodeRanks(0, 0, 4), NodeRanks(1, 4, 4), NodeRanks(2, 8, 4)))
    assert keep_ranks_in_place((1, 2), {1: 4, 2: 4}, before) == [2, 1]
    assert keep_ranks_in_place((0, 2), {0: 4, 2: 4}, before) == [0, 2]
    assert keep_ranks_in_place((0, 1, 2, 3), dict.fromkeys(range(4), 4), before) == [0, 1, 2, 3]
    assert keep_ranks_in_place((1, 2), {1: 4, 2: 2}, before) == [1, 2]
    assert keep_ranks_in_place((0, 1), {0: 1, 1: 1}, None) == [0, 1]
