"""Claims: how runs of several users take turns on one machine. The core has none; extensions register them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.registry import Registry
from weft.job.schema import Job


@dataclass(frozen=True)
class ClaimKind:
    """A way to share a machine. Each function is named as `module:function`."""

    name: str
    hold: str
    """Context manager of (job, nproc, log, nodes) that yields the job, the ranks on this machine and the open files
    that ranks inherit; it waits until the machine is free for the run."""
    listed: str
    """Returns the claims of runs on this machine by run folder, each with `asks_for` (a text),
    `position` and `reason`."""
    trials: str
    """Context manager of a job that yields a runner of short runs, several at once; see TrialRunner."""


CLAIMS: Registry[ClaimKind] = Registry("claim", __name__)


@contextmanager
def claimed_for_run(
    job: Job, nproc: int | None, log: Callable[[str], None], nodes: int = 1
) -> Iterator[tuple[Job, int | None, tuple[int, ...]]]:
    """Hold this machine's part of a run in the context; at once where nothing shares the machine."""
    kind = next(iter(CLAIMS), None)
    if kind is None:
        if job.queue.claim is True:
            raise JobError(
                "queue.claim=true, but no extension of this installation has a queue; queue.claim=auto works"
            )
        yield job, nproc, ()
        return
    with find_object(kind.hold, "claim")(job, nproc, log, nodes) as held:
        yield held


def claims_of_runs() -> dict[str, dict[str, Any]]:
    """The claims of runs on this machine by run folder."""
    return {run: claim for kind in CLAIMS for run, claim in find_object(kind.listed, "claim")().items()}
