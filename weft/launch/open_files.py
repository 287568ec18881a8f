"""The limit of open files: raised for a run, which is refused where it would still be too low."""

from __future__ import annotations

import resource

from weft.job.errors import MachineError

FILES_PER_PROCESS, FILES_PER_RANK = 64, 4
"""Open files of a process without connections, and for each other rank."""


def ensure_open_files(ranks: int) -> None:
    """Raise the soft limit to what a run on this machine needs; raise MachineError if the hard limit is lower."""
    needed = FILES_PER_PROCESS + FILES_PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise MachineError(
            f"a process may open {hard} files here, and a run of {ranks} ranks needs {needed}; "
            "raise it with `ulimit -n 1024`, or in /etc/security/limits.conf"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(needed, 4096) if hard == resource.RLIM_INFINITY else hard, hard))
