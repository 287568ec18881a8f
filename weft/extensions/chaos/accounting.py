"""Accounting of a chaos experiment: the cost of each fault, samples lost or repeated, and useful time.

Everything is computed from observations: when each line of metrics.jsonl and events.jsonl appeared, and which samples
the ranks recorded. A step is committed once its line is in metrics.jsonl.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.extensions.chaos.faults import KINDS, reports_fault
from weft.job.train import BatchRamp

Event = Mapping[str, Any]
"""A line of events.jsonl; its time is in seconds since the epoch."""


@dataclass(frozen=True)
class ObservedStep:
    """A committed step with the time of its observation."""

    time: float
    step: int
    seconds: float
    loss: float | None
    skipped: bool = False


@dataclass(frozen=True)
class InjectedFault:
    """An injected fault."""

    kind: str
    rank: int | None
    phase: str
    step: int
    """Steps committed at injection."""
    time: float


@dataclass(frozen=True)
class Outcome:
    """The cost of a fault. None means never observed."""

    kind: str
    rank: int | None
    phase: str
    step: int
    detect_s: float | None
    resume_s: float | None
    """From the fault to the first step committed after recovery."""
    steps_lost: int | None
    seen_as: str | None
    how: str | None
    why: str | None


OTHER_EVENTS = {"diskfull": "checkpoint_failed", "corrupt": "damaged", "term": "stop", "nan": "skipped"}
"""Other events that report a fault."""

RESUME_EVENTS = ("recovered", "start")
"""Events after which the next committed step follows the recovery."""


UNINTERRUPTING = ("supervisor",)
"""Faults that interrupt no rank."""

LOAD_FAULTS = ("slow_rank", "slow_link", "stall")


def outcomes(
    injected: Sequence[InjectedFault], lines: Sequence[ObservedStep], events: Sequence[Event]
) -> list[Outcome]:
    """The cost of each fault; events up to the next fault belong to the one before."""
    ends = [*(s.time for s in injected[1:]), float("inf")]
    return [outcome(s, end, lines, events) for s, end in zip(injected, ends, strict=False)]  # none, without faults


def outcome(injected: InjectedFault, end: float, lines: Sequence[ObservedStep], events: Sequence[Event]) -> Outcome:
    own = [e for e in events if injected.time <= e["time"] < end]
    seen = _seen(injected, own)
    known_at = seen["time"] if seen else injected.time
    after = [e for e in own if e["event"] in RESUME_EVENTS and e["time"] >= known_at and not _noise(injected, e)]
    named = [e for e in after if seen and e.get("fault") == seen.get("fault", "")]
    went_on = next((e for e in (*named, *after) if e["event"] == "recovered"), after[0] if after else None)
    if went_on is not None:
        first = bisect_left(lines, went_on["time"], key=lambda line: line.time)
    else:  # no rank stopped: skip the step that was in progress
        first = _next_step(injected, lines)
    if first == len(lines) and injected.kind in UNINTERRUPTING:  # the run ended before the event
        first = _next_step(injected, lines)
    resumed = lines[first] if first < len(lines) else None
    lost = None
    if resumed is not None:
        before = max((line.step for line in lines[:first]), default=0)
        lost = max(0, before - resumed.step + 1, int((went_on or {}).get("steps_lost") or 0))
    return Outcome(
        injected.kind, injected.rank, injected.phase, injected.step,
        detect_s=round(seen["time"] - injected.time, 3) if seen else None,
        resume_s=round(resumed.time - injected.time, 3) if resumed else None,
        steps_lost=lost,
        seen_as=str(seen.get("fault", seen["event"])) if seen else None,
        how=str(went_on["how"]) if went_on and "how" in went_on else None,
        why=str(seen["why"]) if seen and "why" in seen else None,
    )  # fmt: skip


def _next_step(injected: InjectedFault, lines: Sequence[ObservedStep]) -> int:
    """Index of the first step that started after a fault."""
    return next((i for i, x in enumerate(lines) if x.time >= injected.time and x.step > injected.step + 1), len(lines))


def _seen(injected: InjectedFault, events: Sequence[Event]) -> Event | None:
    """The event that reports a fault, preferably by its own name and rank."""
    named = [e for e in events if reports_fault(injected.kind, e) or e["event"] == OTHER_EVENTS.get(injected.kind)]
    others = [e for e in events if e["event"] == "fault" and not _noise(injected, e)]
    for found in (named, others):
        right = [e for e in found if injected.rank is None or e.get("rank") in (None, injected.rank)]
        if right or found:
            return (right or found)[0]
    return None


def _noise(injected: InjectedFault, event: Event) -> bool:
    """Whether an event only reports a busy machine, which faults cause as well."""
    return event.get("fault") in LOAD_FAULTS and event.get("fault") not in KINDS[injected.kind].seen_as


def effective_ratio(
    lines: Sequence[ObservedStep], injected: Sequence[InjectedFault], events: Sequence[Event], end: float | None = None
) -> float | None:
    """Time of useful steps over wall time, from the start of the first step to the last commit, or to `end`.

    The time between consecutive commits is useful, including evaluation and checkpoints; a step disturbed by a fault
    counts as one median step, a recomputed step once, and a skipped step not at all.
    """
    if not lines:
        return None
    usual = statistics.median(line.seconds for line in lines)
    last = {line.step: i for i, line in enumerate(lines)}
    broken = sorted(
        [s.time for s in injected]
        + [e["time"] for e in events if e["event"] in (*RESUME_EVENTS, "fault") and e.get("fault") not in LOAD_FAULTS]
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
    """The samples of the committed steps."""

    lost: int
    repeated: int
    read: int


def samples(files: Iterable[Iterable[Mapping[str, Any]]], steps: int, ramp: BatchRamp) -> Samples:
    """Compare the samples that ranks recorded (one iterable of lines a rank) with those of the committed steps.

    Of a repeated step only the newest attempt counts, and in it each rank's last line.
    """
    newest: dict[int, int] = {}
    ids_of: dict[tuple[int, int], dict[int, Sequence[int]]] = {}
    for rank, lines in enumerate(files):
        for line in lines:
            step, attempt = int(line["step"]), int(line.get("attempt", 0))
            if step <= steps:
                newest[step] = max(attempt, newest.get(step, 0))
                ids_of.setdefault((step, attempt), {})[rank] = line["ids"]
    counts = Counter(i for step, attempt in newest.items() for ids in ids_of[step, attempt].values() for i in ids)
    wanted = range(ramp.samples_before(steps))
    known = sum(1 for i in counts if i in wanted)
    return Samples(len(wanted) - known, sum(n - 1 for n in counts.values()), known)


def sentence(finished: bool, found: Sequence[Outcome], read: Samples, ratio: float | None, equal: bool | None) -> str:
    """A one-sentence summary."""
    unseen = [o.kind for o in found if o.detect_s is None]
    slowest = max((o.resume_s for o in found if o.resume_s is not None), default=None)
    parts = [
        f"{'finished' if finished else 'did not finish'} after {len(found)} fault{'s' * (len(found) != 1)}",
        f"{read.lost} samples lost and {read.repeated} read twice",
    ]
    if unseen:
        parts.append(f"not noticed: {', '.join(unseen)}")
    if slowest is not None:
        parts.append(f"recovered after at most {slowest:.1f} s")
    if ratio is not None:
        parts.append(f"{100 * ratio:.1f} % effective time")
    if equal is not None:
        expected = all(KINDS[o.kind].exact for o in found)
        differs = "the weights differ from those of the undisturbed run"
        parts.append(
            "every weight bit-identical to the undisturbed run" if equal
            else differs if expected else f"{differs}, since batches or shares differed"
        )  # fmt: skip
    return "; ".join(parts)
