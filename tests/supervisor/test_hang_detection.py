"""Hang detection: which rank is blamed, and after which time; the status board and attempt files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.supervisor import hang_detection
from weft.supervisor.attempt import Attempt, read_attempt, write_attempt
from weft.supervisor.hang_cause import blame, main_stack, ranks_behind, where
from weft.supervisor.hang_detection import (
    KINDS,
    MIN_WARMUP_TIMEOUT_S,
    STEPS,
    SUPERVISOR_SILENT_S,
    HangDetector,
    SupervisorWatch,
)
from weft.supervisor.status_board import PHASES, Record, StatusBoard

GRID = {0: {"dp": [0, 2], "tp": [0, 1]}, 1: {"dp": [1, 3], "tp": [0, 1]}, 2: {"dp": [0, 2], "tp": [2, 3]},
        3: {"dp": [1, 3], "tp": [2, 3]}}  # fmt: skip
"""Four ranks, 2 × 2."""


def test_rank_that_waits_for_a_waiting_rank_is_not_blamed() -> None:
    """Rank 3 hangs: 2 waits for it on tp, 1 on dp, and 0 waits for both of these."""
    counts = {0: {"dp": 6, "tp": 9}, 1: {"dp": 6, "tp": 8}, 2: {"dp": 5, "tp": 9}, 3: {"dp": 5, "tp": 8}}
    assert list(ranks_behind(counts, GRID)) == [3]
    assert blame(counts, GRID, {0: "dp", 1: "dp", 2: "tp", 3: ""})[3].startswith("it did not start collective ")


def test_pipeline_hang_blames_the_rank_outside_communication() -> None:
    """Stages send different numbers of messages, so their counts cannot be compared."""
    peers = {0: {"pp": [0, 1]}, 1: {"pp": [0, 1]}}
    counts = {0: {"pp": 40}, 1: {"pp": 12}}
    assert blame(counts, peers, {0: "", 1: "pp"}) == {0: "it is in no collective, while others wait on pp"}
    assert blame(counts, peers, {0: "pp", 1: "pp"}) == {}
    assert blame(counts, peers, {0: "", 1: ""}) == {}


@given(st.integers(0, 3), st.integers(1, 50), st.integers(1, 50))
def test_rank_without_collectives_is_found(culprit: int, dp: int, tp: int) -> None:
    counts = {r: {"dp": dp - (r == culprit), "tp": tp - (r == culprit)} for r in GRID}
    assert list(ranks_behind(counts, GRID)) == [culprit]


def test_main_stack_is_the_main_threads() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "/x/threading.py", line 5 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/x/nap.py", line 7 in sleep_on\n'
        '  File "/x/worker.py", line 9 in <module>\n'
    )
    assert main_stack(dump)[0] == 'File "/x/nap.py", line 7 in sleep_on'
    assert where(main_stack(dump)) == "nap.py:7 in sleep_on"
    assert main_stack("") == []


def record(**fields: object) -> Record:
    blank = Record(0, os.getpid(), 1, 0, 0, 1, 0, 0, 0, "compute", 0, 0, 0, 0, 0, ())
    return replace(blank, **fields)  # type: ignore[arg-type]


class ObservedRun:
    """A simulated rank with its own clock, and the polls of its record."""

    def __init__(self, idle_poll_s: float) -> None:
        self.now, self.step, self.moved, self.beats, self.idle_poll_s = 100.0, 0, 100.0, 0, idle_poll_s
        self.hangs = HangDetector(1.5, 120.0, clock=lambda: self.now, poll_s=idle_poll_s)

    def until(self, end: float, every: float | None = None) -> float | None:
        """Take a step every so many seconds, or none. Returns the standstill once it is too long."""
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
def test_hang_timeout_is_learned_from_step_times(every: float, limit: float, idle_poll_s: float) -> None:
    """Longer steps mean a longer timeout; longer poll intervals in normal operation do not."""
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


@pytest.mark.parametrize(("awaited", "limit"), [({1}, 1.5), ({0}, 30.0), (set(), 30.0)])
def test_only_awaited_ranks_extend_the_timeout(
    awaited: set[int], limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 uses the CPU and rank 1 does not: a rank that waits for a GPU spins, and the one that hangs sleeps."""
    clock = [100.0]
    monkeypatch.setattr(hang_detection, "process_state", lambda pid: ("R", clock[0]) if pid == 10 else ("S", 0.0))
    hangs, found = HangDetector(1.5, 120.0, clock=lambda: clock[0], poll_s=0.05), None
    while found is None and clock[0] < 160:
        step = min(int((clock[0] - 100) / 0.1), 20)
        moved = int((100 + 0.1 * step) * 1e9)
        shown = {r: record(pid=10 + r, step=step, beats=int(clock[0] * 100), moved=moved) for r in (0, 1)}
        found = hangs.check(shown, lambda: awaited)
        clock[0] += 0.05
    assert found is not None and limit - 0.1 < found < limit + 0.3
    assert hangs.limit("first") == MIN_WARMUP_TIMEOUT_S  # steps are known: the next attempt need not wait 120 s


def test_board_round_trip(tmp_path: Path) -> None:
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


def test_attempt_round_trip(tmp_path: Path) -> None:
    attempt = Attempt(3, 4, {0: 2, 1: 4}, {2: 0, 4: 1}, "store-3", 1.5, {"fault": "exit"}, [["exit", 1, 7]])
    write_attempt(tmp_path, attempt)
    assert read_attempt(tmp_path, 3) == attempt
    assert (attempt.rank_of(4), attempt.rank_of(0)) == (1, None)


def test_stopped_and_silent_supervisors_are_found() -> None:
    now, states = [0.0], {7: "S", 8: "S"}
    watch = SupervisorWatch(1.5, lambda: now[0], lambda pid: states[pid])

    def after(seconds: float, pid: int, beats: int) -> str:
        now[0] += seconds
        return watch.problem(pid, beats)

    assert after(0, 7, 0) == after(10 * SUPERVISOR_SILENT_S, 7, 0) == "", "it is still starting"
    assert after(1, 7, 1) == after(SUPERVISOR_SILENT_S, 7, 1) == ""
    assert after(1, 7, 1) == "did not respond for 30 s"
    assert after(1, 7, 2) == ""
    states[7] = "T"
    assert after(1, 7, 2) == after(1, 7, 2) == ""
    states[7] = "R"
    assert after(1, 7, 2) == "", "it was continued"
    states[7] = "T"
    assert after(1, 7, 2) == after(1, 7, 2) == "" and after(1, 7, 2) == "was stopped by a signal"
    assert after(1, 8, 0) == "", "it was replaced"


def test_every_phase_has_a_timeout() -> None:
    assert set(STEPS) | set(KINDS) == set(PHASES)
