"""Find the rank that caused a hang, from what the ranks show on the status board."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

P2P_GROUPS = ("pp",)
"""Axes with point-to-point messages, where sequence numbers of different ranks cannot be compared."""

STACK_SIGNAL = signal.SIGUSR2
"""The signal on which a process writes its Python stacks, even while a thread holds the GIL."""

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


@dataclass(frozen=True)
class FaultReport:
    """A fault as written to events.jsonl."""

    kind: str
    rank: int | None
    why: str
    step: int
    position: str = ""
    detected_after_s: float | None = None
    stack: str = ""

    @property
    def subject(self) -> str:
        """The affected rank with its mesh position, or all ranks."""
        place = f" ({self.position})" if self.position else ""
        return "all ranks" if self.rank is None else f"rank {self.rank}{place}"


def ranks_behind(
    counts: Mapping[int, Mapping[str, int]], peers: Mapping[int, Mapping[str, list[int]]]
) -> dict[int, str]:
    """The ranks that others wait for and that do not wait themselves, each with the collective it has not started.

    `counts` are collectives started by rank and group, `peers` the ranks of each group. A rank that started more than
    another member of a group waits for that member.
    """
    missing: dict[int, str] = {}
    waits: set[int] = set()
    for rank, groups in peers.items():
        for group, members in groups.items():
            if group in P2P_GROUPS or rank not in counts:
                continue
            mine = counts[rank].get(group, 0)
            behind = [m for m in members if m in counts and counts[m].get(group, 0) < mine]
            if behind:
                waits.add(rank)
            for member in behind:
                missing[member] = f"collective {counts[member].get(group, 0) + 1} on {group}"
    return {rank: what for rank, what in missing.items() if rank not in waits}


def main_stack(dump: str) -> list[str]:
    """The main thread's frames in the newest faulthandler dump, innermost first."""
    blocks = [b for b in re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.M) if FRAME.search(b)]
    ours = [b for b in blocks if "runpy.py" in b or " in <module>" in b]
    return [line.strip() for line in (ours or blocks or [""])[-1].splitlines() if FRAME.search(line)]


def where(frames: list[str]) -> str:
    """The innermost frame as `file:line in function`."""
    found = FRAME.search(frames[0]) if frames else None
    return f"{Path(found['file']).name}:{found['line']} in {found['name']}" if found else ""


def blame(
    counts: Mapping[int, Mapping[str, int]], peers: Mapping[int, Mapping[str, list[int]]], inside: Mapping[int, str]
) -> dict[int, str]:
    """The ranks that all others wait for, each with what it should be doing; empty if all wait for one another.

    `inside` is the group of the collective that a rank is in, or empty.
    """
    found = ranks_behind(counts, peers) or {rank: "" for rank, group in inside.items() if not group}
    if len(found) == len(peers):
        return {}
    waiting = sorted({group for rank, group in inside.items() if group and rank not in found})
    otherwise = f"it is in no collective, while others wait on {' and '.join(waiting)}" if waiting else "it is in none"
    return {rank: f"it did not start {missing}" if missing else otherwise for rank, missing in found.items()}
