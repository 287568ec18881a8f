"""Sinks: what is fed with the records and events of a run, in a process beside it (weft/watch/follower.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from weft.job.registry import Registry
from weft.job.schema import Job


class Sink(Protocol):
    """Something that is fed with the records and events of a run, in a thread of its own."""

    name: str

    def start(self) -> None:
        """Connect; called in the thread."""

    def feed(self, records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        """New records and events; also called every POLL_S without any."""

    def finish(self, ended: bool) -> None:
        """The run has ended, or, if not `ended`, its process is gone without an end in events.jsonl."""


@dataclass(frozen=True)
class SinkKind:
    """A kind of sink."""

    name: str
    wanted: Callable[[Job], bool]
    """Whether a job asks for it."""
    build: str
    """`module:function` of (run, job, journal, Unix time of this start of the run) that returns the sinks."""


SINKS: Registry[SinkKind] = Registry("watch", __name__)
