"""Forks of the nursery are children of the one who asked: with their exit codes, signals and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from weft.supervisor.fork_server import Child, Nursery, adopting

FORK = """
import os, signal, sys, time
from weft.supervisor.fork_server import serve
if serve():
    slot = int(os.environ["WEFT_SLOT"])
    open(f"{sys.argv[1]}/{slot}", "w").write(f"{os.getpid()} {os.getppid()} {os.getsid(0)}")
    if slot == 3:
        time.sleep(600)
    os._exit(40 + slot)
"""


def soon(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    def start(env: dict[str, str], files: tuple[int, ...]) -> subprocess.Popen[bytes]:
        env = {**os.environ, **env, "WEFT_LAUNCHER": str(os.getpid())}
        return subprocess.Popen([sys.executable, "-c", FORK, str(tmp_path)], env=env, pass_fds=files)

    with adopting() as can:
        assert can
        made = Nursery(start)
        yield made
        made.close()


def born(nursery: Nursery, count: int) -> dict[int, int]:
    pids: dict[int, int] = {}
    soon(lambda: len(pids.update(nursery.births()) or pids) == count)
    return pids


def test_a_fork_is_a_child_of_the_one_who_asked(nursery: Nursery, tmp_path: Path) -> None:
    children = {slot: nursery.ask(slot) for slot in (1, 2)}
    pids = born(nursery, 2)
    assert [children[slot].wait() for slot in (1, 2)] == [41, 42]
    for slot, pid in pids.items():
        assert children[slot].pid == pid
        assert (tmp_path / str(slot)).read_text() == f"{pid} {os.getpid()} {pid}"


def test_a_signal_reaches_whoever_is_not_born_yet(nursery: Nursery) -> None:
    child = nursery.ask(3)
    child.send_signal(signal.SIGTERM)
    assert child.poll() is None
    born(nursery, 1)
    assert child.wait() == -signal.SIGTERM


def test_the_end_of_the_nursery_leaves_the_born_alone_and_takes_the_unborn(nursery: Nursery) -> None:
    alive = nursery.ask(3)
    born(nursery, 1)
    nursery.process.send_signal(signal.SIGSTOP)
    unborn: Child = nursery.ask(1)
    nursery.close()
    assert unborn.wait() == -signal.SIGKILL
    assert psutil.pid_exists(alive.pid)
    assert alive.poll() is None
    alive.kill()
    assert alive.wait() == -signal.SIGKILL
