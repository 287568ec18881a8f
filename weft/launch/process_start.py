"""When a process started, to tell it from a later one with the same process id."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def start_time(pid: int) -> float | None:
    """Seconds from the start of the machine to that of a process; None if there is none.

    psutil adds the time of day at which the machine started, which moves when the clock is set."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        pass
    try:  # no Linux
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def own_record() -> dict[str, float]:
    """This process, for a file from which `running_process` finds it."""
    return {"pid": os.getpid(), "created": start_time(os.getpid()) or 0.0}


def running_process(record: dict[str, float]) -> psutil.Process | None:
    """The process of a record, if it still runs. May raise the errors of a damaged record and of psutil."""
    process = psutil.Process(int(record["pid"]))
    same = start_time(process.pid) == float(record["created"])
    return process if same and process.status() != psutil.STATUS_ZOMBIE else None
