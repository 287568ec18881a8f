"""The consensus under partitions, pauses and restarts: no older attempt ever commits after a newer one has."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.supervisor.nodes.attempt_claims import AttemptClaims
from weft.supervisor.nodes.consensus import (
    ENDED,
    HALTED,
    LEASE,
    LOST_S,
    MINORITY_WAIT_S,
    RUNNING,
    Consensus,
    Decision,
    NodeRanks,
    Report,
)
from weft.supervisor.restart_limit import grown_node_lost_s, idle_attempts

TICK = 0.1
TROUBLES = ("cut", "link", "pause", "restart", "heal", "break", "steady")


@dataclass
class World:
    """Nodes with their own clocks, links that fail, one shared disk, and a record of every commit."""

    size: int
    chance: random.Random
    now: float = 0.0
    links: dict[frozenset[int], bool] = field(default_factory=dict)
    paused: dict[int, float] = field(default_factory=dict)
    disk: dict[int, Decision] = field(default_factory=dict)
    commits: list[tuple[float, int, int]] = field(default_factory=list)
    mail: list[tuple[float, int, dict, Decision | None]] = field(default_factory=list)
    start_s: float = 0.0
    stop_s: float = 0.0
    """Time that an attempt needs before its first commit, and that ranks need to stop."""
    stopping: dict[int, tuple[int, float]] = field(default_factory=dict)
    grows: bool = True
    """Whether the heartbeat timeout grows after attempts without a commit."""

    def __post_init__(self) -> None:
        self.offsets = [self.chance.uniform(-1e4, 1e4) for _ in range(self.size)]
        self.nodes = [Consensus(n, self.size, incarnation=f"{n}/0") for n in range(self.size)]

    def clock(self, node: int) -> float:
        return self.now + self.offsets[node]

    def restart(self, node: int) -> None:
        self.nodes[node] = Consensus(node, self.size, incarnation=f"{node}/{self.now}")

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            awake = [n for n in range(self.size) if self.paused.get(n, 0.0) <= self.now]
            self.chance.shuffle(awake)
            for node in awake:
                self._deliver(node)
                self._act(node)

    def _deliver(self, node: int) -> None:
        arrived, under_way = [], []
        for letter in self.mail:
            (arrived if letter[1] == node and letter[0] <= self.now else under_way).append(letter)
        self.mail = under_way
        for _, _, result, decision in arrived:
            self.nodes[node].receive(Report.from_json(result), self.clock(node))
            if decision is not None:
                self.nodes[node].adopt(decision, self.clock(node))

    def _act(self, node: int) -> None:
        consensus, now = self.nodes[node], self.clock(node)
        attempt, since = self.stopping.get(node, (0, 0.0))
        if consensus.own.state == RUNNING and attempt != consensus.own.attempt and consensus.trouble(now):
            attempt, since = self.stopping[node] = consensus.own.attempt, self.now
        if consensus.own.state == RUNNING and attempt == consensus.own.attempt and self.now >= since + self.stop_s:
            consensus.update(now, state=HALTED)
        if consensus.own.state == HALTED and consensus.decision is not None:
            following = self.disk.get(consensus.decision.number + 1)
            if following is not None and not consensus.adopt(following, now):
                consensus.leave(following.number)
        if (proposal := consensus.propose(now)) is not None:
            number = max([0, *self.disk]) + 1 if consensus.decision is None else proposal.number
            incarnations = {str(n): consensus.reports[n].incarnation for n in proposal.nodes if n != node}
            assignments = tuple(NodeRanks(n, i, 1) for i, n in enumerate(proposal.nodes))
            before = self.disk.get(number - 1)
            commits = [c for c in self.commits if c[1] == number - 1]
            idle = idle_attempts(before.given["idle"], len(commits), self.grows) if before else 0
            given = {"idle": idle, "lost_s": grown_node_lost_s(LOST_S, idle)}
            decision = Decision(
                number, node, assignments, why=str(self.now),
                given=given | {"incarnations": {**incarnations, str(node): consensus.incarnation}},
            )  # fmt: skip
            consensus.adopt(self.disk.setdefault(number, decision), now)
        result = _through_json(consensus.update(now).to_json())
        for other in range(self.size):
            if other != node and self.links.get(frozenset({node, other}), True):
                self.mail.append((self.now + self.chance.choice((0.0, 0.0, 0.3)), other, result, consensus.decision))
        decided = consensus.decision
        if (
            decided
            and decided.assignments[0].node == node
            and consensus.own.state == RUNNING
            and now < consensus.lease_until()
            and self.now >= float(decided.why) + self.start_s
        ):
            self.commits.append((self.now, decided.number, node))


def _through_json(value: dict) -> dict:
    return json.loads(json.dumps(value))


def _cut(world: World, side: set[int]) -> None:
    for a in range(world.size):
        for b in range(a):
            world.links[frozenset({a, b})] = (a in side) == (b in side)


def _started(size: int, seed: int = 0) -> World:
    world = World(size, random.Random(seed))
    world.run(3)
    assert world.commits and world.commits[-1][1] == 1
    return world


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 5),
    seed=st.integers(0, 10**6),
    troubles=st.lists(st.tuples(st.sampled_from(TROUBLES), st.floats(0.1, 6)), min_size=1, max_size=8),
)
def test_commits_never_go_back_to_an_older_attempt(size: int, seed: int, troubles: list[tuple[str, float]]) -> None:
    world = World(size, random.Random(seed))
    world.run(1 + seed % 3)
    for kind, seconds in troubles:
        node = world.chance.randrange(size)
        if kind == "cut":
            _cut(world, {n for n in range(size) if world.chance.random() < 0.5})
        elif kind == "link":
            world.links[frozenset({node, (node + 1) % size})] = world.chance.random() < 0.5
        elif kind == "pause":
            world.paused[node] = world.now + seconds
        elif kind == "restart":
            world.restart(node)
        elif kind == "steady":
            world.nodes[node].reduce_lost_s(lambda until: None)
        elif kind == "break":
            world.nodes[node].update(world.clock(node), state=HALTED, why="a rank was killed")
        else:
            world.links.clear()
        world.run(seconds)
    world.links.clear()
    world.run(MINORITY_WAIT_S + 6)
    attempts = [number for _, number, _ in world.commits]
    assert attempts == sorted(attempts)
    owners = {number: node for _, number, node in world.commits}
    assert all(owners[number] == node for _, number, node in world.commits)
    assert len({d.number for d in world.disk.values()}) == len(world.disk)


def test_majority_continues_and_minority_rejoins() -> None:
    world = _started(3)
    _cut(world, {0})  # the leader, alone
    cut_at = world.now
    world.run(LOST_S + 2)
    assert world.disk[2].nodes == {1, 2}
    assert world.commits[-1][1:] == (2, 1)
    assert max(t for t, number, _ in world.commits if number == 1) < cut_at + LEASE * LOST_S + 2 * TICK
    assert world.nodes[0].own.state == HALTED
    world.links.clear()
    world.run(1)
    assert world.nodes[1].joiners(world.clock(1)) == (0,)
    world.nodes[1].update(world.clock(1), state=HALTED, why="node 0 is back")
    world.run(1)
    assert world.disk[3].nodes == {0, 1, 2}
    assert world.commits[-1][1:] == (3, 0)


@pytest.mark.parametrize("grows", [False, True])
def test_nodes_that_are_often_silent_commit_once_the_timeout_has_grown(grows: bool) -> None:
    world = World(2, random.Random(0), start_s=10.0, stop_s=1.0, grows=grows)
    while world.now < 100:  # more than half of the time, node 1 does not run
        world.run(2)
        world.paused[1] = world.now + 3
        world.run(3)
    assert bool(world.commits) == grows
    last = world.disk[max(world.disk)]
    assert last.given["lost_s"] == (9.6 if grows else LOST_S)
    if grows:
        assert len(world.disk) == 2
        world.nodes[0].reduce_lost_s(lambda until: None)
        world.run(1)
        assert (world.nodes[0].lost_s_of(1), world.nodes[1].lost_s_of(0)) == (9.6, LOST_S), "each by its own lease"
    else:
        assert len(world.disk) > 10


def test_tie_has_one_winner_and_single_node_continues() -> None:
    world = _started(2)
    _cut(world, {0})
    world.run(LOST_S + 2)
    winner = world.commits[-1][2]
    assert world.disk[2].nodes == {winner}
    assert world.nodes[1 - winner].decision is None

    world = _started(4)
    world.paused |= dict.fromkeys((0, 1, 2), 1e9)
    world.run(LOST_S + MINORITY_WAIT_S / 2)
    assert 2 not in world.disk
    world.run(MINORITY_WAIT_S)
    assert world.disk[2].nodes == {3}
    assert world.commits[-1][1:] == (2, 3)


def test_fault_on_one_node_starts_a_new_attempt() -> None:
    world = _started(3)
    world.nodes[2].update(world.clock(2), state=HALTED, why="rank 2 was killed")
    world.run(1)
    assert world.disk[2].nodes == {0, 1, 2}
    assert world.commits[-1][1:] == (2, 0)
    for node in (1, 2):
        world.nodes[node].update(world.clock(node), state=ENDED, code=0)
        world.run(0.5)
        world.paused[node] = 1e9
    world.run(LOST_S + 1)
    assert not world.nodes[0].trouble(world.clock(0))
    assert 3 not in world.disk


def test_an_attempt_can_be_claimed_once(tmp_path: Path) -> None:
    first, second = AttemptClaims(tmp_path / "attempts"), AttemptClaims(tmp_path / "attempts")
    assert first.newest() == 0
    decision = Decision(
        7, 1, (NodeRanks(1, 0, 2, "10.0.0.1"), NodeRanks(2, 2, 2)), "node 0 was lost", "shrink", {"a": 1}
    )
    assert first.make(decision)
    assert not second.make(Decision(7, 2, ()))
    assert second.read(7) == decision
    assert (second.newest(), second.read(8)) == (7, None)
    (tmp_path / "attempts" / "000008.json").write_text("{", encoding="utf-8")
    assert second.read(8) is None
    assert sorted(p.name for p in (tmp_path / "attempts").iterdir()) == ["000007.json", "000008.json"]


@pytest.mark.parametrize("spoil", [lambda d: d.pop("seen"), lambda d: d.update(seen=3), lambda d: d.update(node="x")])
def test_invalid_report_is_refused(spoil: Callable[[dict], object]) -> None:
    data = Report(1).to_json()
    spoil(data)
    with pytest.raises((KeyError, ValueError, TypeError, AttributeError)):
        Report.from_json(data)


def test_last_node_continues_alone() -> None:
    consensus = Consensus(1, 2, incarnation="1/0")
    assert consensus.adopt(Decision(4, 1, (NodeRanks(1, 0, 2),), "node 0 is lost"), now=0.0)
    consensus.update(1.0, state=HALTED, why="")  # it could not tell why its ranks came back
    proposal = consensus.propose(1.1)
    assert proposal is not None
    assert (proposal.number, proposal.nodes) == (5, (1,))


def test_elastic_run_starts_with_any_nodes_that_are_enough() -> None:
    node = Consensus(3, 2, elastic=True)
    assert node.propose(0.0) is None
    node.receive(Report(5, sent=0.1), 0.1)
    found = node.propose(0.2)
    assert found is not None
    assert found.nodes == (3, 5)
    node.receive(Report(7, attempt=4, state=RUNNING, sent=0.2), 0.2)
    assert node.propose(0.3) is None, "the run goes on elsewhere: these nodes join it"
    assert Consensus(3, 2).propose(0.0) is None
