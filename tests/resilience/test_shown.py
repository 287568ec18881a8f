"""What a process says of itself while it runs is what others see of it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

SHOWS = """
import os, sys
from weft.resilience.shown import show
kept = [show({**os.environ, "RANK": str(rank), "ODD": "ä"}) for rank in (1, 7)][-1]
print(flush=True)
sys.stdin.read()
"""


def test_others_see_the_rank_that_a_process_was_given_later() -> None:
    env = {k: v for k, v in os.environ.items() if k != "RANK"}
    process = subprocess.Popen([sys.executable, "-c", SHOWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert process.stdout
    process.stdout.readline()
    assert psutil.Process(process.pid).environ() == {**env, "RANK": "7", "ODD": "ä"}
    process.communicate(b"")
    assert process.returncode == 0
