"""Membership over real sockets: nodes find, authenticate and lose each other; and the ranks' store."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.command import DEADLINE_S, until

from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import StorePath
from weft.job.load import load_job
from weft.supervisor.authenticated_store import AuthenticatedStore
from weft.supervisor.nodes.consensus import Decision, NodeRanks, Proposal, Report
from weft.supervisor.nodes.discovery import NodeRegistry
from weft.supervisor.nodes.membership import Membership, incarnations
from weft.supervisor.nodes.node_address import NodeAddress, local_address
from weft.supervisor.replan import replan
from weft.supervisor.store_server import StoreServer
from weft.wire.channel import Disconnected
from weft.wire.secret import share_secret


def _decide(proposal: Proposal, reports: Mapping[int, Report]) -> Decision:
    assignments = tuple(NodeRanks(n, i, 1, reports[n].address) for i, n in enumerate(proposal.nodes))
    given = {"incarnations": incarnations(reports, proposal.nodes)}
    return Decision(proposal.number, proposal.nodes[0], assignments, proposal.why, given=given)


class SupervisedRank:
    """A node that halts when there is trouble, as a supervisor would after stopping its ranks."""

    def __init__(self, folder: Path, node: int, count: int, shared: StorePath | None = None) -> None:
        self.news, self.notes = threading.Event(), []
        place = NodeAddress(node, count, "127.0.0.1")
        self.nodes = Membership(
            RunDir(folder), place, 1, _decide, self.news.set, self.notes.append, lost_s=6.0, shared=shared
        )
        self.nodes.start()
        self.stop = threading.Event()
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while not self.stop.is_set():
            self.news.wait(0.1)
            self.news.clear()
            if self.nodes.decision is not None and self.nodes.consensus.own.state == "running" and self.nodes.trouble():
                self.nodes.halt()

    @property
    def attempt(self) -> int:
        return self.nodes.consensus.own.attempt

    def die(self) -> None:
        self.stop.set()
        self.nodes.close()


def test_nothing_is_decided_before_the_start(tmp_path: Path) -> None:
    """The callbacks of a supervisor use its membership, which must exist by then."""
    threads = set(threading.enumerate())
    nodes = Membership(RunDir(tmp_path), NodeAddress(0, 1, "127.0.0.1"), 1, _decide, lambda: None, print)
    assert not [t.name for t in set(threading.enumerate()) - threads if t.name in ("decide_attempts", "find_others")]
    nodes.start()
    until(lambda: nodes.decision is not None)
    nodes.close()


def test_nodes_agree_lose_and_readmit_a_node(tmp_path: Path) -> None:
    members = [SupervisedRank(tmp_path, node, 3) for node in range(3)]
    until(lambda: all(m.attempt == 1 for m in members))
    until(lambda: all(m.nodes.lease_until() > 0 for m in members))
    with pytest.raises(MachineError, match="node 1 of this run is being run by another process"):
        SupervisedRank(tmp_path, 1, 3)

    for member in members:  # strangers at every socket of the run
        for garbage in (os.urandom(300), b'{"report": {"node": 0}}\n' * 50):
            with socket.create_connection(member.nodes._listener.address, timeout=DEADLINE_S) as sock:
                sock.sendall(garbage)
    members[1].nodes.halt("rank 1 was killed by SIGKILL")
    until(lambda: all(m.attempt == 2 for m in members))
    assert members[0].nodes.decision.why == "rank 1 was killed by SIGKILL"
    assert members[0].nodes.neighbour()[0] == 1
    assert members[2].nodes.neighbour()[0] == 0

    members[0].die()
    until(lambda: [m.attempt for m in members[1:]] == [3, 3])
    decision = members[1].nodes.decision
    assert (decision.nodes, decision.leader, decision.why) == ({1, 2}, 1, "node 0 is silent")

    members[0] = SupervisedRank(tmp_path, 0, 3)
    until(lambda: members[1].nodes.joining_nodes() == (0,))
    assert members[2].nodes.joining_nodes() == ()
    until(members[1].nodes.pause)
    until(members[2].nodes.pausing)
    members[1].nodes.halt("node 0 is back")
    until(lambda: all(m.attempt == 4 for m in members))
    members[0].nodes.end(6, ["weft: why"])
    until(lambda: (end := members[2].nodes.remote_end()) is not None and (end.code, end.lines) == (6, ("weft: why",)))
    assert all(len(m.notes) == len(set(m.notes)) for m in members)
    for member in members:
        member.die()
    assert not list((tmp_path / "nodes").glob("*.json"))


def test_a_node_that_was_silent_when_it_ended_is_not_left_out(tmp_path: Path) -> None:
    """Its end is in the run's folder, though its last report was not sent."""
    members = [SupervisedRank(tmp_path, node, 2) for node in range(2)]
    until(lambda: all(m.attempt == 1 and m.nodes.lease_until() > 0 for m in members))
    members[1].nodes._registry.end(6, 1, ["weft: why"])
    assert members[0].nodes.remote_end() is None, "while its ranks run, only reports count"
    members[1].die()
    until(
        lambda: (
            (end := members[0].nodes.remote_end()) is not None
            and (end.node, end.code, end.lines) == (1, 6, ("weft: why",))
        )
    )
    members[0].nodes._follow_or_claim()
    assert members[0].attempt == 1
    members[0].die()


def test_nodes_without_a_shared_folder_meet_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SECRET", raising=False)
    store, folders = StorePath(f"memory://{tmp_path.name}/run"), [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        share_secret(store, folder)
    members = [SupervisedRank(folder, node, 2, store) for node, folder in enumerate(folders)]
    until(lambda: all(m.attempt == 1 and m.nodes.lease_until() > 0 for m in members))
    assert members[0].nodes.secret == members[1].nodes.secret
    members[0].die()
    until(lambda: members[1].attempt == 2)
    members[0] = SupervisedRank(folders[0], 0, 2, store)  # it comes back, and finds the other in the store
    until(lambda: members[1].nodes.joining_nodes() == (0,))
    members[1].nodes.halt("node 0 is back")
    until(lambda: all(m.attempt == 3 for m in members))
    members[0].nodes.end(75)
    until(lambda: (end := members[1].nodes.remote_end()) is not None and end.code == members[1].nodes.ended() == 75)
    for member in members:
        member.die()
    assert store.names() == [".secret", *(f"attempts/00000{n}.json" for n in (1, 2, 3)), "nodes/ended"]


def test_store_answers_only_ranks_of_its_attempt(tmp_path: Path) -> None:
    member, store_server = SupervisedRank(tmp_path, 0, 1), StoreServer()
    member.nodes.services["store"] = store_server.serve
    address, secret = member.nodes._listener.address, member.nodes.secret
    store_server.open(7)
    first, second = AuthenticatedStore(address, secret, 7), AuthenticatedStore(address, secret, 7)
    first.set("a", b"\x00\xff")
    assert second.get("a") == b"\x00\xff"
    assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    assert (first.check(["a", "b"]), first.num_keys(), first.delete_key("a"), first.check(["a"])) == (
        False,
        2,
        True,
        False,
    )
    assert first.compare_set("c", b"", b"x") == b"x"
    assert second.compare_set("c", b"y", b"z") == b"x"
    threading.Timer(0.1, lambda: second.set("late", b"1")).start()
    first.wait(["late"], timedelta(seconds=DEADLINE_S))
    with pytest.raises(dist.DistStoreError, match="waiting for never"):
        first.wait(["never"], timedelta(seconds=0.01))
    store_server.open(8)
    with pytest.raises(Disconnected, match="attempt 7 is over; this is attempt 8"):
        first.set("a", b"too late")
    assert not AuthenticatedStore(address, secret, 8).check(["c"])
    with pytest.raises(ConnectionError):
        AuthenticatedStore(address, b"x" * 64, 8).check(["c"])
    member.die()


def test_node_address_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", "NNODES", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert NodeAddress.from_env() is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert NodeAddress.from_env() == NodeAddress(1, 3, "127.0.0.1")
    monkeypatch.setenv("NODE_RANK", "2")
    monkeypatch.setenv("NNODES", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert NodeAddress.from_env() == NodeAddress(2, 4, local_address("localhost"))
    assert NodeAddress.from_env(bind="127.0.0.2") == NodeAddress(2, 4, "127.0.0.2")
    monkeypatch.setenv("NODE_RANK", "first")
    with pytest.raises(MachineError, match="NODE_RANK=first and NNODES=4 must be numbers"):
        NodeAddress.from_env()


@pytest.mark.parametrize(
    ("parallel", "ranks", "layout"),
    [
        ({"dp_shard": 2, "tp": 2}, 4, "dp_shard 2 (zero 3) × tp 2"),
        ({"dp_shard": 2, "tp": 2}, 3, "tp 2"),
        ({"dp_replicate": 4}, 3, "dp_replicate 2"),
        ({"pp": 4}, 1, "1 rank"),
    ],
)
def test_replan_keeps_the_batch(parallel: dict, ranks: int, layout: str) -> None:
    words = [f"parallel.{axis}={degree}" for axis, degree in parallel.items()]
    words += ["train.global_batch=8", "cluster.device=cpu", "parallel.zero=3"]
    job, plan = replan(load_job("demo", words), ranks, nodes=1)
    assert (plan.layout(), job.train.global_batch) == (layout, 8)
    assert plan.microbatch * plan.accumulation * plan.dp == 8


def test_disconnected_node_reads_the_end_of_the_run(tmp_path: Path) -> None:
    first, second = NodeRegistry(tmp_path, 0, tmp_path), NodeRegistry(tmp_path, 1, tmp_path)
    assert second.ended() is None
    first.end(75, 3)
    assert second.ended() == 75
    second.leave()
    assert NodeRegistry(tmp_path, 1, tmp_path).ended() is None  # that was the start before
