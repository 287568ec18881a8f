"""Who waits for a bell wakes up when somebody rings, whoever that is and whenever it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from weft.supervisor.heartbeat import Heart
from weft.supervisor.status_board import Board
from weft.supervisor.wakeup import Bell, rung_by_signals

LONG_S = 120.0


def test_a_bell_is_heard_once_however_often_and_early_it_rang(tmp_path: Path) -> None:
    mine, theirs = Bell(tmp_path / "bell"), Bell(tmp_path / "bell")
    for _ in range(100_000):  # more than it holds: nobody who rings waits
        theirs.ring()
    theirs.close()
    assert mine.wait(LONG_S)
    assert not mine.wait(0.0)
    assert (tmp_path / "bell").stat().st_mode & 0o077 == 0


def test_a_bell_is_heard_from_another_process_and_so_is_another_file(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "bell")
    ring = (
        "from pathlib import Path; from weft.supervisor.wakeup import Bell; "
        f"Bell(Path({str(tmp_path)!r}, 'bell')).ring()"
    )
    with subprocess.Popen([sys.executable, "-c", ring]):
        assert bell.wait(LONG_S)
    read, write = os.pipe()
    os.write(write, b"x")
    assert not bell.wait(LONG_S, read)
    os.close(read)
    os.close(write)


def test_signals_and_the_end_of_a_child_ring(tmp_path: Path) -> None:
    bell, before = Bell(tmp_path / "bell"), signal.getsignal(signal.SIGCHLD)
    got: list[int] = []
    was = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        with rung_by_signals(bell):
            with subprocess.Popen([sys.executable, "-c", ""]):
                assert bell.wait(LONG_S)
            bell.wait(0.0)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert bell.wait(LONG_S)
            assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, was)
    assert signal.getsignal(signal.SIGCHLD) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_words_that_somebody_waits_for_ring(tmp_path: Path) -> None:
    board, other = Board(tmp_path / "board", slots=2), Board(tmp_path / "board")
    for change, heard in (
        (lambda: other.put(1, "want", 1), ["guardian"]),
        (lambda: other.put(0, "deaths", 1), ["supervisor"]),
        (lambda: other.put(0, "step", 1), []),
        (lambda: other.__setitem__("published", 1), ["0", "1"]),
        (lambda: other.__setitem__("end", 1), ["guardian"]),
    ):
        change()
        assert [name for name in ("guardian", "supervisor", "0", "1") if board.bell(name).wait(0.0)] == heard


def test_a_heart_hears_at_once_that_its_attempt_is_over_and_that_there_is_another(tmp_path: Path) -> None:
    board, fenced = Board(tmp_path / "board", slots=1), threading.Event()
    board["attempt"] = 1
    heart = Heart(board, 0)
    heart.on_fence = fenced.set
    heart.join(1, 0)
    before = board.record(0).moved
    assert before <= time.monotonic_ns()
    heart.now("compute", 3)
    assert board.record(0).moved > before
    heart.news.clear()
    Board(tmp_path / "board")["attempt"] = 2
    assert fenced.wait(LONG_S)
    heart.wait_for_news(LONG_S)
    assert not heart.news.is_set()
