"""The account of a rehearsal: what each fault cost, which samples were lost or read twice, what time was useful.

Everything here is worked out from what an onlooker saw: when each line of metrics.jsonl and events.jsonl appeared, and
which samples the ranks say they read. A step counts as committed once its line stands in metrics.jsonl.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.chaos.faults import KINDS, tells_of

Event = Mapping[str, Any]
"""A line of events.jsonl; its time is in seconds since the epoch."""


@dataclass(frozen=True)
class Line:
    """A committed step as an onlooker saw it."""

    time: float
    step: int
    seconds: float
    loss: float | None
    skipped: bool = False


@dataclass(frozen=True)
class Struck:
    """A fault that was put into the run."""

    kind: str
    rank: int | None
    phase: str
    step: int
    """Steps committed when it struck."""
    time: float


@dataclass(frozen=True)
class Outcome:
    """What a fault cost. None: never, as far as the files tell."""

    kind: str
    rank: int | None
    phase: str
    step: int
    detect_s: float | None
    resume_s: float | None
    """From the fault to the first step that was committed after the run had gone on."""
    steps_lost: int | None
    seen_as: str | None
    how: str | None
    why: str | None


ALSO_TELLS = {"diskfull": "checkpoint_failed", "corrupt": "damaged", "term": "stop", "nan": "skipped"}
"""Events of other names that tell of a fault."""

WENT_ON = ("recovered", "start")
"""Events after which the next committed step is one after the fault."""


UNFELT = ("supervisor",)
"""Faults for which no rank stops."""

NOISE = ("slow_rank", "slow_link", "stall")


def outcomes(struck: Sequence[Struck], lines: Sequence[Line], events: Sequence[Event]) -> list[Outcome]:
    """What each fault cost. Faults strike one after another; what happens until the next belongs to the one before."""
    ends = [s.time for s in struck[1:]] + [float("inf")]
    return [outcome(s, end, lines, events) for s, end in zip(struck, ends, strict=True)]


def outcome(struck: Struck, end: float, lines: Sequence[Line], events: Sequence[Event]) -> Outcome:
    own = [e for e in events if struck.time <= e["time"] < end]
    seen = _seen(struck, own)
    known_at = seen["time"] if seen else struck.time
    after = [e for e in own if e["event"] in WENT_ON and e["time"] >= known_at and not _noise(struck, e)]
    named = [e for e in after if seen and e.get("fault") == seen.get("fault", "")]
    went_on = next((e for e in (*named, *after) if e["event"] == "recovered"), after[0] if after else None)
    if went_on is not None:
        first = bisect_left(lines, went_on["time"], key=lambda line: line.time)
    else:  # nobody stopped for it: what was under way is let pass
        first = _next_step(struck, lines)
    if first == len(lines) and struck.kind in UNFELT:  # the last steps were done before anyone told of it
        first = _next_step(struck, lines)
    resumed = lines[first] if first < len(lines) else None
    lost = None
    if resumed is not None:
        before = max((line.step for line in lines[:first]), default=0)
        lost = max(0, before - resumed.step + 1, int((went_on or {}).get("steps_lost") or 0))
    return Outcome(
        struck.kind, struck.rank, struck.phase, struck.step,
        detect_s=round(seen["time"] - struck.time, 3) if seen else None,
        resume_s=round(resumed.time - struck.time, 3) if resumed else None,
        steps_lost=lost,
        seen_as=str(seen.get("fault", seen["event"])) if seen else None,
        how=str(went_on["how"]) if went_on and "how" in went_on else None,
        why=str(seen["why"]) if seen and "why" in seen else None,
    )  # fmt: skip


def _next_step(struck: Struck, lines: Sequence[Line]) -> int:
    """Where the first step is that was begun after a fault."""
    return next((i for i, x in enumerate(lines) if x.time >= struck.time and x.step > struck.step + 1), len(lines))


def _seen(struck: Struck, events: Sequence[Event]) -> Event | None:
    """The event that tells of a fault: by its own name before any other, with the right rank before another."""
    named = [e for e in events if tells_of(struck.kind, e) or e["event"] == ALSO_TELLS.get(struck.kind)]
    others = [e for e in events if e["event"] == "fault" and not _noise(struck, e)]
    for found in (named, others):
        right = [e for e in found if struck.rank is None or e.get("rank") in (None, struck.rank)]
        if right or found:
            return (right or found)[0]
    return None


def _noise(struck: Struck, event: Event) -> bool:
    """Whether an event tells of a busy machine, which the faults themselves make, and of nothing that was struck."""
    return event.get("fault") in NOISE and event.get("fault") not in KINDS[struck.kind].seen_as


def effective_ratio(
    lines: Sequence[Line], struck: Sequence[Struck], events: Sequence[Event], end: float | None = None
) -> float | None:
    """Time of useful steps over wall time, from the beginning of the first step to the last commit, or to `end`.

    Useful is the time between two commits that follow each other, evaluation and checkpoints included, if nothing
    went wrong between them; of a step in whose time something did, one median step. Steps that were computed again
    count once, and steps whose batch was skipped not at all.
    """
    if not lines:
        return None
    usual = statistics.median(line.seconds for line in lines)
    last = {line.step: i for i, line in enumerate(lines)}
    broken = sorted(
        [s.time for s in struck]
        + [e["time"] for e in events if e["event"] in (*WENT_ON, "fault") and e.get("fault") not in NOISE]
    )
    useful = 0.0
    for i, line in enumerate(lines):
        if last[line.step] != i or line.skipped:
            continue
        before = lines[i - 1] if i else None
        gap = line.time - before.time if before and before.step == line.step - 1 else line.seconds
        since = before.time if before else line.time - line.seconds
        whole = bisect_left(broken, since) == bisect_left(broken, line.time)
        useful += gap if whole else min(gap, usual)
    wall = (lines[-1].time if end is None else end) - (lines[0].time - lines[0].seconds)
    return min(1.0, useful / wall) if wall > 0 else None


@dataclass(frozen=True)
class Samples:
    """What became of the samples of the committed steps."""

    lost: int
    repeated: int
    read: int


def samples(files: Iterable[Iterable[Mapping[str, Any]]], steps: int, global_batch: int) -> Samples:
    """Hold what the ranks say they read, one iterable of lines a rank, against the samples of so many steps.

    Of a step that was told several times only the last telling counts: that of the newest attempt, and in it each
    rank's last line.
    """
    newest: dict[int, int] = {}
    told: dict[tuple[int, int], dict[int, Sequence[int]]] = {}
    for rank, lines in enumerate(files):
        for line in lines:
            step, attempt = int(line["step"]), int(line.get("attempt", 0))
            if step <= steps:
                newest[step] = max(attempt, newest.get(step, 0))
                told.setdefault((step, attempt), {})[rank] = line["ids"]
    counts = Counter(i for step, attempt in newest.items() for ids in told[step, attempt].values() for i in ids)
    wanted = range(steps * global_batch)
    known = sum(1 for i in counts if i in wanted)
    return Samples(len(wanted) - known, sum(n - 1 for n in counts.values()), known)


def sentence(finished: bool, found: Sequence[Outcome], read: Samples, ratio: float | None, equal: bool | None) -> str:
    """The account in one sentence."""
    unseen = [o.kind for o in found if o.detect_s is None]
    slowest = max((o.resume_s for o in found if o.resume_s is not None), default=None)
    parts = [
        f"{'finished' if finished else 'did not finish'} after {len(found)} fault{'s' * (len(found) != 1)}",
        f"{read.lost} samples lost and {read.repeated} read twice",
    ]
    if unseen:
        parts.append(f"not noticed: {', '.join(unseen)}")
    if slowest is not None:
        parts.append(f"back after at most {slowest:.1f} s")
    if ratio is not None:
        parts.append(f"{100 * ratio:.1f} % of the time useful")
    if equal is not None:
        expected = all(KINDS[o.kind].exact for o in found)
        differs = "the weights differ from those of the undisturbed run"
        parts.append(
            "every weight bit for bit that of the undisturbed run" if equal
            else differs if expected else f"{differs}, as batches or shares did"
        )  # fmt: skip
    return "; ".join(parts)
