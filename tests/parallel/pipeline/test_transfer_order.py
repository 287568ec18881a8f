"""No pipeline deadlocks over NCCL: each rank's sends and receives are run on a model of NCCL's point-to-point rules.

The model: a communicator runs what a rank issued on it one operation after the other; an operation starts when all that
the rank computed before it is done; a send and its receive end together, when both have started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.meter import Meter
from weft.parallel.pipeline import messages
from weft.parallel.pipeline.messages import Message, StageLinks, sent_by, transfer_order, transfers_of
from weft.planner.schedules.actions import Action, Schedule
from weft.planner.schedules.known_schedules import SCHEDULES, make_schedule


class Op(NamedTuple):
    """What a rank's program does next: compute an action, issue a transfer, or wait for a receive."""

    kind: str
    peer: int = -1
    number: int = 0
    """Of the sends to, or the receives from, this peer."""


class Recorder:
    """Stands for the process group: notes what StageLinks issues and waits for."""

    def __init__(self) -> None:
        self.program: list[Op] = []
        self.counts: dict[tuple[str, int], int] = {}

    def issue(self, ops: list[Any]) -> list[Any]:
        works = []
        for op in ops:
            kind = "send" if op.op is dist.isend else "receive"
            number = self.counts[kind, op.peer] = self.counts.get((kind, op.peer), 0) + 1
            self.program.append(Op(kind, op.peer, number))
            wait = Op("wait", op.peer, number) if kind == "receive" else Op("sent", op.peer, number)
            works.append(SimpleNamespace(wait=lambda w=wait: self.program.append(w), is_completed=lambda: False))
        return works


class RecordedAxis:
    name = "pp"

    def __init__(self, rank: int) -> None:
        self.rank, self.group, self.meter = rank, None, Meter()

    def count(self, *_: Any, **__: Any) -> None: ...


def inputs_of(action: Action, schedule: Schedule) -> tuple[Message, int] | None:
    """The message that an action needs, and the stage that it comes from."""
    kind, stage, m = action
    if kind == "F":
        return (Message("F", stage, m), stage - 1) if stage else None
    return None if kind == "W" or stage == schedule.stages - 1 else (Message("B", stage, m), stage + 1)


def programs(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> list[list[Op]]:
    """What every rank does in a step, by the code that really sends."""
    found = []
    for rank in range(schedule.ranks):
        recorder = Recorder()
        with monkeypatch.context() as patched:
            patched.setattr(messages.dist, "get_backend", lambda group: "nccl")
            patched.setattr(messages.dist, "batch_isend_irecv", recorder.issue)
            patched.setattr(
                messages.dist, "P2POp", lambda op, t, group, group_peer: SimpleNamespace(op=op, peer=group_peer)
            )
            links = StageLinks(RecordedAxis(rank), torch.device("cpu"))  # type: ignore[arg-type]
            links.begin(transfers_of(schedule, rank), lambda message: ((1,), torch.float32))
            for action in schedule.actions[rank]:
                if (needed := inputs_of(action, schedule)) is not None:
                    links.receive(needed[0], schedule.rank_of[needed[1]])
                recorder.program.append(Op("compute"))
                if (message := sent_by(action, schedule)) is not None:
                    links.send(message, schedule.rank_of[message.to], torch.zeros(1))
            links.end()
        found.append(recorder.program)
    return found


def receives_first(schedule: Schedule) -> Iterator[list[Op]]:
    """Programs in the order that Gloo allows: two receives from every rank are issued before anything is sent."""
    for rank in range(schedule.ranks):
        coming: dict[int, int] = {}
        for t in transfers_of(schedule, rank):
            if t.target == rank:
                coming[t.source] = coming.get(t.source, 0) + 1
        posted = {source: min(2, count) for source, count in coming.items()}
        program = [Op("receive", source, i + 1) for source, n in posted.items() for i in range(n)]
        waited: dict[int, int] = {}
        sent: dict[int, int] = {}
        for action in schedule.actions[rank]:
            needed = inputs_of(action, schedule)
            if needed is not None and (source := schedule.rank_of[needed[1]]) != rank:
                waited[source] = waited.get(source, 0) + 1
                program.append(Op("wait", source, waited[source]))
                if posted[source] < coming[source]:
                    posted[source] += 1
                    program.append(Op("receive", source, posted[source]))
            program.append(Op("compute"))
            message = sent_by(action, schedule)
            if message is not None and (to := schedule.rank_of[message.to]) != rank:
                sent[to] = sent.get(to, 0) + 1
                program.append(Op("send", to, sent[to]))
        yield program


def stuck(programs: list[list[Op]], by_pair: bool = False) -> list[str]:
    """Run the programs; returns what the ranks that cannot go on wait for. `by_pair`: a communicator for each pair."""
    ranks = range(len(programs))
    streams: list[dict[int, deque[tuple[Op, int]]]] = [{} for _ in ranks]
    computing: list[deque[Op]] = [deque() for _ in ranks]
    done_compute, received = [0] * len(programs), [set[tuple[int, int]]() for _ in ranks]
    for rank, program in enumerate(programs):
        before = 0
        for op in program:
            if op.kind in ("send", "receive"):
                streams[rank].setdefault(op.peer if by_pair else 0, deque()).append((op, before))
            else:
                computing[rank].append(op)
                before += 1

    def heads(rank: int) -> Iterator[Op]:
        for stream in streams[rank].values():
            if stream and stream[0][1] <= done_compute[rank]:
                yield stream[0][0]

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while (
                computing[rank]
                and (computing[rank][0].kind != "wait" or computing[rank][0][1:] in received[rank])
                and not (
                    computing[rank][0].kind == "sent"
                    and any(o.kind == "send" for s in streams[rank].values() for o, _ in s)
                )
            ):
                computing[rank].popleft()
                done_compute[rank] += 1
                moved = True
            for op in list(heads(rank)):
                other = Op("receive" if op.kind == "send" else "send", rank, op.number)
                if other in heads(op.peer):
                    streams[rank][op.peer if by_pair else 0].popleft()
                    streams[op.peer][rank if by_pair else 0].popleft()
                    to, source = (op.peer, rank) if op.kind == "send" else (rank, op.peer)
                    received[to].add((source, op.number))
                    moved = True
    return [f"rank {r}: {[s[0][0] for s in streams[r].values() if s]}" for r in ranks if any(streams[r].values())]


SHAPES = [(name, ranks, m) for name in SCHEDULES for ranks in (2, 3, 4, 8) for m in (1, 2, 3, 4, 8, 17)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_deadlocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, ranks, microbatches in (s for s in SHAPES if s[0] == name):
        schedule = make_schedule(name, ranks, microbatches)
        assert not stuck(programs(schedule, monkeypatch)), (name, ranks, microbatches)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 6), st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_no_shape_deadlocks(name: str, ranks: int, microbatches: int, virtual: int) -> None:
    allowed = SCHEDULES[name].allowed_stages
    schedule = make_schedule(name, ranks, microbatches, virtual if allowed is None or virtual in allowed else None)
    with pytest.MonkeyPatch.context() as patch:
        assert not stuck(programs(schedule, patch))


@pytest.mark.parametrize("by_pair", [False, True])
def test_the_order_that_only_gloo_allows_deadlocks(by_pair: bool) -> None:
    for name in SCHEDULES:
        assert stuck(list(receives_first(make_schedule(name, 2, 4))), by_pair), name


def test_every_rank_issues_its_messages_in_one_common_order() -> None:
    for name, ranks, microbatches in SHAPES:
        schedule = make_schedule(name, ranks, microbatches)
        order = transfer_order(schedule)
        assert len(order) == len(set(order))
        place = {t: i for i, t in enumerate(order)}
        for rank in range(ranks):
            sends = [
                t
                for a in schedule.actions[rank]
                if (m := sent_by(a, schedule))
                for t in order
                if t.message == m and t.source == rank
            ]
            assert sends == sorted(sends, key=place.__getitem__)


def test_a_message_out_of_order_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule("1f1b", 2, 4)
    recorder = Recorder()
    monkeypatch.setattr(messages.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(messages.dist, "batch_isend_irecv", recorder.issue)
    monkeypatch.setattr(
        messages.dist, "P2POp", lambda op, t, group, group_peer: SimpleNamespace(op=op, peer=group_peer)
    )
    links = StageLinks(RecordedAxis(0), torch.device("cpu"))  # type: ignore[arg-type]
    links.begin(transfers_of(schedule, 0), lambda message: ((1,), torch.float32))
    with pytest.raises(RuntimeError, match="not the order of the schedule"):
        links.send(Message("F", 1, 3), 1, torch.zeros(1))
