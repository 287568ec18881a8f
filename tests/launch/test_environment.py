"""Others find a fork by the environment it shows."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from weft.launch.environment import room

FORK = """
import os, sys
from weft.launch.environment import show
show({"RANK": "11", "WORLD_SIZE": "12"})
if os.fork() == 0:
    show({"RANK": "3", "WORLD_SIZE": "16"})
    assert "WEFT_ROOM" not in os.environ and "RANK" not in os.environ
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
show({"RANK": "x" * 1000})
os.wait()
"""


def test_a_fork_shows_its_own_and_keeps_the_rest() -> None:
    env = {**os.environ, "BEFORE": "1", **room(), "AFTER": "2"}
    command = [sys.executable, "-c", FORK]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        fork = psutil.Process(int(parent.stdout.readline()))
        for process, rank, world in ((fork, "3", "16"), (psutil.Process(parent.pid), "11", "12")):
            seen = process.environ()
            assert (seen["RANK"], seen["WORLD_SIZE"], seen["BEFORE"], seen["AFTER"]) == (rank, world, "1", "2")
            assert set(seen) == {*env, "RANK", "WORLD_SIZE"}
        parent.communicate()
    assert parent.returncode == 0


def test_without_room_nothing_is_shown() -> None:
    script = "from weft.launch.environment import show; show({'RANK': '1'}); print(open('/proc/self/environ').read())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "RANK=1" not in done.stdout
