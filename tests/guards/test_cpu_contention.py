"""CPU contention is distinguished from idleness, with real processes on one core."""

from __future__ import annotations

import subprocess
import sys

WAITS = """
import os, sys, time
from weft.guards.cpu_contention import CpuContention
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
contention, waited = CpuContention(), 0.0
deadline = time.monotonic() + 120
while waited < 0.05 and time.monotonic() < deadline:
    sum(range(10000))
    waited += contention.since()[0]
print(waited >= 0.05)
"""


def test_contention_of_two_processes_on_one_core() -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first = ranks[0].communicate()[0]
    assert first.strip() == "True"
    ranks[1].kill()
    ranks[1].communicate()
