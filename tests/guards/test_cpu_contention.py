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
BUSY = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while True:
    sum(range(10000))
"""


def test_contention_of_two_processes_on_one_core() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as other:
        try:
            done = subprocess.run([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True, check=True)
        finally:
            other.kill()
    assert done.stdout == "True\n"
