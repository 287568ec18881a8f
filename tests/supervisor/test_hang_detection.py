"""What the supervisor makes of what it sees: who is to blame, and when a standstill has lasted too long."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.checkpoint import memory_snapshots as snapshots
from weft.checkpoint.memory_snapshots import AGREE_AFTER, FEWEST, Snapshots, newest_common
from weft.supervisor.attempt import Attempt, read_attempt, write_attempt
from weft.supervisor.diagnosis import blame, main_stack, ranks_behind, where
from weft.supervisor.hang_detection import HangDetector
from weft.supervisor.status_board import Record, StatusBoard

GRID = {0: {"dp": [0, 2], "tp": [0, 1]}, 1: {"dp": [1, 3], "tp": [0, 1]}, 2: {"dp": [0, 2], "tp": [2, 3]},
        3: {"dp": [1, 3], "tp": [2, 3]}}  # fmt: skip
"""Four ranks, 2 × 2."""


def test_who_waits_for_a_waiter_is_not_to_blame() -> None:
    """Rank 3 hangs: 2 waits for it on tp, 1 on dp, and 0 waits for both of these."""
    counts = {0: {"dp": 6, "tp": 9}, 1: {"dp": 6, "tp": 8}, 2: {"dp": 5, "tp": 9}, 3: {"dp": 5, "tp": 8}}
    assert list(ranks_behind(counts, GRID)) == [3]
    assert blame(counts, GRID, {0: "dp", 1: "dp", 2: "tp", 3: ""})[3].startswith("it did not begin collective ")


def test_a_pipeline_is_judged_by_who_is_in_no_exchange() -> None:
    """There the ranks send different things, and their counts mean nothing."""
    peers = {0: {"pp": [0, 1]}, 1: {"pp": [0, 1]}}
    counts = {0: {"pp": 40}, 1: {"pp": 12}}
    assert blame(counts, peers, {0: "", 1: "pp"}) == {0: "it is in no collective, while others wait on pp"}
    assert blame(counts, peers, {0: "pp", 1: "pp"}) == {}
    assert blame(counts, peers, {0: "", 1: ""}) == {}


@given(st.integers(0, 3), st.integers(1, 50), st.integers(1, 50))
def test_a_rank_that_begins_nothing_is_always_found(culprit: int, dp: int, tp: int) -> None:
    counts = {r: {"dp": dp - (r == culprit), "tp": tp - (r == culprit)} for r in GRID}
    assert list(ranks_behind(counts, GRID)) == [culprit]


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=4), st.none() | st.integers(0, 9))
def test_the_newest_common_step_is_on_every_rank_and_no_newer_one_is(held: list[set[int]], at_most: int | None) -> None:
    found = newest_common(held, at_most)
    fitting = [s for s in range(10) if all(s in h for h in held) and (at_most is None or s <= at_most)]
    assert found == (fitting[-1] if fitting else None)


def test_a_stack_is_the_main_threads() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "/x/threading.py", line 5 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/x/nap.py", line 7 in sleep_on\n'
        '  File "/x/worker.py", line 9 in <module>\n'
    )
    assert main_stack(dump)[0] == 'File "/x/nap.py", line 7 in sleep_on'
    assert where(main_stack(dump)) == "nap.py:7 in sleep_on"
    assert main_stack("") == []


def record(**fields: object) -> Record:
    blank = Record(0, os.getpid(), 1, 0, 0, 1, 0, 0, 0, "compute", 0, 0, 0, 0, ())
    return replace(blank, **fields)  # type: ignore[arg-type]


class ObservedRun:
    """A rank that moves at times of a clock of its own, and the looks at it, so far apart as is asked for."""

    def __init__(self, idle_poll_s: float) -> None:
        self.now, self.step, self.moved, self.beats, self.idle_poll_s = 100.0, 0, 100.0, 0, idle_poll_s
        self.hangs = HangDetector(1.5, 120.0, clock=lambda: self.now, poll_s=idle_poll_s)

    def until(self, end: float, every: float | None = None) -> float | None:
        """Take a step so often, or none; returns the standstill, as soon as it is too long."""
        while self.now < end:
            while every and self.moved + every <= self.now:
                self.step, self.moved = self.step + 1, self.moved + every
            self.beats += 1
            shown = record(pid=0, step=self.step, beats=self.beats, moved=int(self.moved * 1e9))
            if (found := self.hangs.check({0: shown})) is not None:
                return found
            self.hangs.poll_s = 0.05 if self.hangs.is_late else self.idle_poll_s
            self.now += self.hangs.poll_s
        return None


@pytest.mark.parametrize(("every", "limit"), [(1.5, 12.0), (0.02, 1.5)])
@pytest.mark.parametrize("idle_poll_s", [0.05, 0.2])
def test_patience_is_learned_from_the_runs_own_pace(every: float, limit: float, idle_poll_s: float) -> None:
    """What is too long for a quick run is usual where steps take a second and a half; and looks that are far apart, as
    long as all is well, make nobody more patient."""
    run = ObservedRun(idle_poll_s)
    assert run.until(112.0, every) is None
    assert not run.hangs.is_late
    found = run.until(200.0)
    assert found is not None
    assert limit - 8 * idle_poll_s <= found <= limit + 8 * 0.1
    assert run.hangs.load == 1.0
    assert not run.hangs.silent(0)
    assert not run.hangs.stopped(0)
    assert run.hangs.limit("eval") >= 600  # nothing is known of it
    assert run.hangs.limit("start") >= 120


def test_the_board_shows_what_was_put_there(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "board", slots=3)
    board.clear(1)
    board.put(1, "pid", 42)
    board.count(1, 2, 7)
    board["attempt"] = 2
    again = StatusBoard(tmp_path / "board")
    assert (again.slots, again.record(1).pid, again.record(1).counts[2], again.record(1).phase) == (3, 42, 7, "start")
    assert again.record(0).phase == "gone"
    assert again.valid(2)
    assert not again.valid(1)
    again.lease_until = 0.0
    assert not board.valid(2)
    assert (tmp_path / "board").stat().st_mode & 0o077 == 0


def test_an_attempt_is_read_as_it_was_written(tmp_path: Path) -> None:
    attempt = Attempt(3, 4, {0: 2, 1: 4}, {2: 0, 4: 1}, "store-3", 1.5, {"fault": "exit"}, [["exit", 1, 7]])
    write_attempt(tmp_path, attempt)
    assert read_attempt(tmp_path, 3) == attempt
    assert (attempt.rank_of(4), attempt.rank_of(0)) == (1, None)


def state(step: int) -> dict[str, torch.Tensor]:
    bits = torch.arange(7, dtype=torch.uint8) + step
    return {"w": torch.full((3, 5), float(step)), "bits": bits, "n": torch.tensor(step)}


def test_snapshots_outlive_who_took_them_and_torn_ones_are_none(tmp_path: Path) -> None:
    first = Snapshots(tmp_path, rank=0, keep=FEWEST)
    for step in range(1, 6):
        first.take(step, state(step), {"step": step})
        if step < 5:
            first.seal(step, {"tokens": 10 * step})
    assert first.held() == [3, 4]  # the fifth was copied and never committed
    second = Snapshots(tmp_path, rank=0, keep=FEWEST)
    assert second.held() == [3, 4]
    into = {name: torch.zeros_like(t) for name, t in state(0).items()}
    assert second.holds(into)
    assert second.load(4, into) == {"step": 4, "tokens": 40}
    assert all(torch.equal(into[n], t) for n, t in state(4).items())
    assert not second.holds({"w": torch.zeros(1)})
    for path in tmp_path.glob("snap-0.*"):
        content = bytearray(path.read_bytes())
        content[60] ^= 1  # inside the table
        path.write_bytes(content)
    assert Snapshots(tmp_path, rank=0, keep=FEWEST).held() == []


def test_the_ring_of_snapshots_is_whole_again_after_every_fault(tmp_path: Path) -> None:
    for attempt in range(8):  # each is broken while a step is copied, and some steps are undone
        ring = Snapshots(tmp_path, rank=0, keep=FEWEST)
        if attempt:
            ring.load(min(ring.held()), {name: torch.zeros_like(t) for name, t in state(0).items()})
        for step in range(10 * attempt, 10 * attempt + 5):
            ring.take(step, state(step), {})
            ring.seal(step, {})
        assert ring.held() == list(range(10 * attempt + 5 - FEWEST, 10 * attempt + 5))
        ring.take(10 * attempt + 5, state(0), {})
    assert len(list(tmp_path.glob("snap-0.*"))) == FEWEST


def test_a_ring_made_beside_the_run_holds_nobody_up_and_keeps_nothing_before_it_is_there(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path, rank=0, keep=FEWEST)
    ring.background, ring.every = True, AGREE_AFTER  # as on a GPU
    assert not ring.due(1) and ring.due(AGREE_AFTER)
    for step in range(1, AGREE_AFTER + 1):
        ring.tick(step)
    ring.take(AGREE_AFTER, state(1), {})
    ring.seal(AGREE_AFTER, {})
    deadline = time.monotonic() + 20
    step = AGREE_AFTER
    while not ring.held() and time.monotonic() < deadline:
        step += 1
        ring.take(step, state(step), {})
        ring.seal(step, {})
        time.sleep(0.01)
    assert ring.held() and min(ring.held()) > AGREE_AFTER - 1
    assert ring.wish() == 1  # these few bytes are copied in no time
    ring._copies.clear()
    ring._steps.extend([0.3] * 8)
    ring._copies.append(0.36)  # 0.09 s of it are not hidden by a step
    assert ring.wish() == 40


def test_a_large_ring_grows_by_a_file_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "AT_ONCE", 1000)
    ring = Snapshots(tmp_path, rank=0, keep=FEWEST)
    assert ring.due(1)
    for step in range(1, FEWEST + 3):
        ring.take(step, state(step), {})
        ring.seal(step, {})
        assert len(list(tmp_path.glob("snap-0.*"))) == min(step, FEWEST)
        assert ring.held() == list(range(max(1, step - FEWEST + 1), step + 1))
    assert ring.every == AGREE_AFTER and not ring.due(1)  # until the ranks agree


def test_what_only_an_update_changes_is_copied_before_the_next_one(tmp_path: Path) -> None:
    weight, seen = torch.zeros(4), torch.zeros(4)
    shards = {"model.w": weight, "buffer.seen": seen}
    ring = Snapshots(tmp_path, rank=0, keep=FEWEST)
    into = {name: torch.empty(4) for name in shards}
    for step in (1, 2, 3):
        weight.fill_(step)
        seen.fill_(step)
        ring.take(step, shards, {})
        seen.fill_(-1)  # the next forward pass
        if step == 2:  # else it is committed before the next update: an evaluation is due
            ring.settle()
            weight.fill_(-1)
        ring.seal(step, {})
        ring.load(step, into)
        assert [into[name].tolist() for name in shards] == [[step] * 4] * 2
    ring.take(4, shards, {})
    ring.drop()
    ring.seal(4, {})
    assert ring.held() == [2, 3]
