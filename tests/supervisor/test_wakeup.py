"""Wake-ups between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from weft.supervisor.heartbeat import BoardHeartbeat
from weft.supervisor.status_board import StatusBoard
from weft.supervisor.wakeup import Wakeup, wake_on_signals

LONG_S = 120.0


def test_notifications_are_merged_and_not_lost(tmp_path: Path) -> None:
    own, theirs = Wakeup(tmp_path / "wakeup"), Wakeup(tmp_path / "wakeup")
    for _ in range(100_000):  # more than it holds: nobody who rings waits
        theirs.notify()
    theirs.close()
    assert own.wait(LONG_S)
    assert not own.wait(0.0)
    assert (tmp_path / "wakeup").stat().st_mode & 0o077 == 0


def test_wakeup_from_another_process_or_file(tmp_path: Path) -> None:
    wakeup = Wakeup(tmp_path / "wakeup")
    ring = (
        "from pathlib import Path; from weft.supervisor.wakeup import Wakeup; "
        f"Wakeup(Path({str(tmp_path)!r}, 'wakeup')).notify()"
    )
    with subprocess.Popen([sys.executable, "-c", ring]):
        assert wakeup.wait(LONG_S)
    read, write = os.pipe()
    os.write(write, b"x")
    assert not wakeup.wait(LONG_S, read)
    os.close(read)
    os.close(write)


def test_signals_and_child_exit_wake(tmp_path: Path) -> None:
    wakeup, before = Wakeup(tmp_path / "wakeup"), signal.getsignal(signal.SIGCHLD)
    got: list[int] = []
    was = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        with wake_on_signals(wakeup):
            with subprocess.Popen([sys.executable, "-c", ""]):
                assert wakeup.wait(LONG_S)
            wakeup.wait(0.0)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert wakeup.wait(LONG_S)
            assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, was)
    assert signal.getsignal(signal.SIGCHLD) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_board_words_wake_their_waiters(tmp_path: Path) -> None:
    board, other = StatusBoard(tmp_path / "board", slots=2), StatusBoard(tmp_path / "board")
    for change, heard in (
        (lambda: other.put(1, "want", 1), ["manager"]),
        (lambda: other.put(0, "deaths", 1), ["supervisor"]),
        (lambda: other.put(0, "step", 1), []),
        (lambda: other.__setitem__("published", 1), ["0", "1"]),
        (lambda: other.__setitem__("end", 1), ["manager"]),
    ):
        change()
        assert [name for name in ("manager", "supervisor", "0", "1") if board.wakeup(name).wait(0.0)] == heard


def test_heartbeat_notices_end_of_attempt(tmp_path: Path) -> None:
    board, fenced = StatusBoard(tmp_path / "board", slots=1), threading.Event()
    board["attempt"] = 1
    heartbeat = BoardHeartbeat(board, 0)
    heartbeat.on_fence = fenced.set
    heartbeat.join(1, 0)
    before = board.record(0).moved
    assert before <= time.monotonic_ns()
    heartbeat.now("compute", 3)
    assert board.record(0).moved > before
    heartbeat.news.clear()
    StatusBoard(tmp_path / "board")["attempt"] = 2
    assert fenced.wait(LONG_S)
    heartbeat.wait_for_news(LONG_S)
    assert not heartbeat.news.is_set()
