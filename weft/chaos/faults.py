"""The menu of faults that a rehearsal (`weft chaos`) can put into a run, and when it puts them there."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from weft.job.errors import JobError

Way = Literal["signal", "inside", "restart", "disk", "nodes"]
"""How it is done: signals to a process, from inside a rank, by ending the run and starting it again, on the disk, or
to a whole node."""


PHASES = ("data", "compute", "collective", "update", "eval", "checkpoint")
"""What a rank may be doing when a fault strikes it from outside, as the board shows it."""

POINTS = ("data", "forward", "backward", "update")
"""Where one can strike from inside."""


@dataclass(frozen=True)
class Kind:
    """One entry of the menu."""

    what: str
    """In words, for people."""
    way: Way
    seen_as: tuple[str, ...]
    """What events.jsonl may call it."""
    exact: bool = True
    """Whether the run must still end with the bits of the undisturbed one."""
    in_one_rank: bool = True
    history: int = 0
    """Steps that must lie behind it: a spike is one beside what came before."""
    room: int = 3
    """Steps it needs to be noticed and mended in."""
    phases: tuple[str, ...] = PHASES
    """Where in a step it may strike."""


KINDS: dict[str, Kind] = {
    "kill": Kind("a rank is killed (kill -9)", "signal", ("exit",)),
    "stop": Kind("a rank is stopped (SIGSTOP), and woken after the run went on", "signal", ("stopped", "hang")),
    "sleep": Kind("a rank falls asleep in the middle of a step", "inside", ("hang",), phases=POINTS),
    "gil": Kind("a rank holds Python's lock and does nothing more", "inside", ("gil", "hang"), phases=POINTS),
    "term": Kind("the scheduler wants the machine back (SIGTERM), and starts the run again", "restart", ("preempted",)),
    "nan": Kind("a rank's gradients become NaN", "inside", ("nan",), exact=False, phases=("backward",)),
    "spike": Kind(
        "a batch is poisoned: targets that nothing could foresee", "inside", ("spike",), exact=False, in_one_rank=False,
        history=30, room=26, phases=("forward",),
    ),
    "bitflip": Kind(
        "a bit of a rank's weights flips", "inside", ("divergence", "spike", "nan"), exact=False, room=12,
        phases=("update",),
    ),
    "slow": Kind("a rank gets half of its processor time", "signal", ("slow_rank",), exact=False, history=12, room=25),
    "diskfull": Kind("the run's disk is full for a while", "disk", ("disk_full",), in_one_rank=False, room=6),
    "corrupt": Kind(
        "the run ends, and its newest checkpoint is damaged before it starts again", "restart", ("damaged",),
        in_one_rank=False,
    ),
    "oom": Kind("a rank runs out of memory", "inside", ("oom",), exact=False, phases=("forward", "backward", "update")),
    "partition": Kind("a node's link is cut, and mended later", "nodes", ("partition", "node_lost"), False, False),
    "node": Kind("a node is lost with all its processes", "nodes", ("node_lost", "partition", "exit"), False, False),
    "supervisor": Kind("the process that watches the ranks is killed", "signal", ("supervisor",), in_one_rank=False),
}  # fmt: skip

RANDOM = ("kill", "stop", "sleep", "gil", "term")
"""What `random:N` draws from: deaths, hangs and preemption, after which every bit must still be the same."""

FIRST = 2
"""Steps before the first fault."""


@dataclass(frozen=True)
class Wish:
    """A fault that was asked for; whom it strikes is drawn where nobody says."""

    kind: str
    rank: int | None = None


@dataclass(frozen=True)
class Fault:
    """A fault of the schedule."""

    number: int
    kind: str
    rank: int | None
    """None where it is not one rank's."""
    phase: str
    step: int
    """It strikes when this many steps are done."""
    moment: float
    """A number from 0 to 1 that settles what else is left to chance."""
    latest: int = 1 << 60
    """From this step on it no longer waits for its phase."""


def parse(text: str, seed: int, world: int, nodes: int) -> list[Wish]:
    """`kill:3,stop@1,nan`, `random:10` or `all` as wishes: KIND[:COUNT][@RANK], with commas between them."""
    wishes: list[Wish] = []
    chance = random.Random(f"{seed} kinds")
    for word in (w.strip() for w in text.split(",")):
        match = re.fullmatch(r"([a-z_]+)(?::(\d+))?(?:@(\d+))?", word)
        if match is None or match[2] == "0":
            raise JobError(f"--faults: {word!r} is no fault; write kill, kill:3 for three, or kill@1 for rank 1")
        name, count, rank = match[1], int(match[2] or 1), None if match[3] is None else int(match[3])
        if rank is not None and rank >= world:
            raise JobError(f"--faults: {word} names rank {rank}, but the run has ranks 0 to {world - 1}")
        if name == "random":
            wishes += [Wish(chance.choice(RANDOM), rank) for _ in range(count)]
        elif name == "all":
            wishes += [Wish(k, rank if KINDS[k].in_one_rank else None) for k in possible(nodes)] * count
        else:
            _check(name, rank, nodes)
            wishes += [Wish(name, rank)] * count
    return wishes


def possible(nodes: int) -> list[str]:
    """The kinds that a run of so many nodes can suffer, in the order of the menu."""
    return [name for name, kind in KINDS.items() if kind.way != "nodes" or nodes > 1]


def _check(name: str, rank: int | None, nodes: int) -> None:
    if name not in KINDS:
        near = difflib.get_close_matches(name, [*KINDS, "random", "all"], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}, random and all"
        raise JobError(f"--faults: {name!r} is not known; {hint}")
    if KINDS[name].way == "nodes" and nodes < 2:
        raise JobError(f"--faults: {name} needs a run of at least 2 nodes, and this one has {nodes}; give --nodes 2")
    if rank is not None and not KINDS[name].in_one_rank:
        raise JobError(f"--faults: {name}@{rank}: {name} does not strike one rank; write {name}")


def schedule(wishes: Iterable[Wish], *, seed: int, world: int, steps: int) -> list[Fault]:
    """Spread the faults over a run's steps, the same for the same seed, each with room to be mended in before the next.

    Those that need a history come last; apart from that the order is the one that was asked for.
    """
    wanted = sorted(wishes, key=lambda w: KINDS[w.kind].history)
    chance = random.Random(f"{seed} moments")
    needed = FIRST
    for wish in wanted:
        needed = max(needed, KINDS[wish.kind].history) + KINDS[wish.kind].room
    if steps < needed:
        what = f"{len(wanted)} faults need" if len(wanted) != 1 else f"the fault {wanted[0].kind} needs"
        raise JobError(
            f"train.steps is {steps}, and {what} at least {needed} steps to strike and be mended in; "
            "raise train.steps or ask for fewer"
        )
    found, free = [], FIRST
    for i, wish in enumerate(wanted):
        kind = KINDS[wish.kind]
        earliest = max(free, kind.history)
        latest = _latest(wanted[i:], steps)
        step = earliest + int(chance.uniform(0.3, 1.0) * (latest - earliest) / (len(wanted) - i))
        found.append(draw(i, wish, step, world, chance))
        free = step + kind.room
    ends = [f.step for f in found[1:]] + [steps]
    return [replace(f, latest=end - KINDS[f.kind].room) for f, end in zip(found, ends, strict=True)]


def draw(number: int, wish: Wish, step: int, world: int, chance: random.Random) -> Fault:
    """Settle by chance what a wish leaves open."""
    kind = KINDS[wish.kind]
    rank = chance.randrange(world) if wish.rank is None else wish.rank
    return Fault(
        number, wish.kind, rank if kind.in_one_rank else None, chance.choice(kind.phases), step, chance.random()
    )


def _latest(rest: list[Wish], steps: int) -> int:
    """When the first of some faults must strike so that all of them have room before the end."""
    return steps - sum(KINDS[w.kind].room for w in rest)


def order_of(fault: Fault, at_step: int) -> dict[str, int | str | float | None]:
    """What a rank reads of a fault that comes from inside."""
    return {
        "id": fault.number, "kind": fault.kind, "rank": fault.rank, "phase": fault.phase, "step": at_step,
        "moment": fault.moment,
    }  # fmt: skip


def tells_of(kind: str, event: Mapping[str, object]) -> bool:
    """Whether a line of events.jsonl names this kind of fault."""
    return event.get("event") == "fault" and event.get("fault") in KINDS[kind].seen_as
