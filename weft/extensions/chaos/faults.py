"""The kinds of faults that `weft chaos` can inject, and their schedule."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from weft.job.errors import JobError

Way = Literal["signal", "inside", "restart", "disk", "nodes"]
"""How it is injected: by a signal, inside a rank, by ending and restarting the run, on the disk, or on a whole node."""


PHASES = ("data", "compute", "collective", "update", "eval", "checkpoint")
"""Phases of a rank, as shown on the status board, in which a fault can be injected from outside."""

STEP_POINTS = ("data", "forward", "backward", "update")
"""Points of a step at which a fault can be injected inside a rank."""


@dataclass(frozen=True)
class InjectableFault:
    """A kind of fault."""

    what: str
    """Description for people."""
    way: Way
    seen_as: tuple[str, ...]
    """Possible names in events.jsonl."""
    exact: bool = True
    """Whether the run must still end bit-identical to the undisturbed one."""
    in_one_rank: bool = True
    history: int = 0
    """Steps required before it: a spike is detected relative to earlier steps."""
    room: int = 3
    """Steps needed to detect it and recover."""
    phases: tuple[str, ...] = PHASES
    """Phases of a step in which it can happen."""


KINDS: dict[str, InjectableFault] = {
    "kill": InjectableFault("a rank is killed (kill -9)", "signal", ("exit",)),
    "stop": InjectableFault("a rank is stopped (SIGSTOP), and resumed after recovery", "signal", ("stopped", "hang")),
    "sleep": InjectableFault("a rank sleeps in the middle of a step", "inside", ("hang",), phases=STEP_POINTS),
    "gil": InjectableFault("a rank holds the GIL forever", "inside", ("gil", "hang"), phases=STEP_POINTS),
    "term": InjectableFault("the scheduler preempts the run (SIGTERM) and restarts it", "restart", ("preempted",)),
    "nan": InjectableFault("a rank's gradients become NaN", "inside", ("nan",), exact=False, phases=("backward",)),
    "spike": InjectableFault(
        "a batch is poisoned with unpredictable targets",
        "inside",
        ("spike",),
        exact=False,
        in_one_rank=False,
        history=30,
        room=26,
        phases=("forward",),
    ),
    "bitflip": InjectableFault(
        "a bit of a rank's weights flips",
        "inside",
        ("divergence", "spike", "nan"),
        exact=False,
        room=12,
        phases=("update",),
    ),
    "slow": InjectableFault(
        "a rank gets half of its processor time", "signal", ("slow_rank",), exact=False, history=12, room=25
    ),
    "diskfull": InjectableFault(
        "the run's disk is full for a while", "disk", ("disk_full",), in_one_rank=False, room=6
    ),
    "corrupt": InjectableFault(
        "the run ends, and its newest checkpoint is damaged before it starts again",
        "restart",
        ("damaged",),
        in_one_rank=False,
    ),
    "oom": InjectableFault(
        "a rank runs out of memory", "inside", ("oom",), exact=False, phases=("forward", "backward", "update")
    ),
    "illegal": InjectableFault(
        "a rank accesses memory that is not its own: on a GPU its CUDA context is lost",
        "inside",
        ("exit",),
        phases=("forward", "backward", "update"),
    ),
    "partition": InjectableFault(
        "a node's link is cut, and restored later", "nodes", ("partition", "node_lost"), False, False
    ),
    "node": InjectableFault(
        "a node is lost with all its processes", "nodes", ("node_lost", "partition", "exit"), False, False
    ),
    "supervisor": InjectableFault("the supervisor is killed", "signal", ("supervisor",), in_one_rank=False),
    "burst": InjectableFault(
        "2 to 6 ranks are killed, each at most a second after the last one, also those that replace them",
        "signal",
        ("exit",),
        in_one_rank=False,
        room=6,
    ),
}

RANDOM_KINDS = ("kill", "stop", "sleep", "gil", "term")
"""What `random:N` draws from: kills, hangs and preemption, after which the result must be bit-identical."""

BURST_KILLS, BURST_SPACING_S = (2, 6), 1.0
"""Fewest and most kills of a burst, and the longest time between two of them."""

MAX_FAULTS = 10_000
"""Largest count of one kind of fault in --faults."""

FIRST_FAULT_STEP = 2
"""Steps before the first fault."""


@dataclass(frozen=True)
class FaultRequest:
    """A requested fault; a random rank if none is given."""

    kind: str
    rank: int | None = None


@dataclass(frozen=True)
class Fault:
    """A scheduled fault."""

    number: int
    kind: str
    rank: int | None
    """None if it does not affect a single rank."""
    phase: str
    step: int
    """Completed steps at injection."""
    moment: float
    """A random number from 0 to 1 for further choices."""
    latest: int = 1 << 60
    """From this step on it does not wait for its phase."""


def hold_path(orders: Path) -> Path:
    """The file with the last step that may start before the next fault, beside the orders."""
    return orders.with_name(f"{orders.stem}-hold")


def parse(text: str, seed: int, world: int, nodes: int) -> list[FaultRequest]:
    """`kill:3,stop@1,nan`, `random:10` or `all` as requests: KIND[:COUNT][@RANK], with commas between them."""
    requests: list[FaultRequest] = []
    chance = random.Random(f"{seed} kinds")
    for word in (w.strip() for w in text.split(",")):
        match = re.fullmatch(r"([a-z_]+)(?::(\d+))?(?:@(\d+))?", word)
        if match is None or match[2] == "0":
            raise JobError(f"--faults: {word!r} is not a fault; write kill, kill:3 for three, or kill@1 for rank 1")
        if max(len(match[2] or ""), len(match[3] or "")) > 9 or int(match[2] or 1) > MAX_FAULTS:
            raise JobError(f"--faults: {word!r} asks for too many; at most {MAX_FAULTS} faults of a kind are possible")
        name, count, rank = match[1], int(match[2] or 1), None if match[3] is None else int(match[3])
        if rank is not None and rank >= world:
            raise JobError(f"--faults: {word} names rank {rank}, but the run has ranks 0 to {world - 1}")
        if name == "random":
            requests += [FaultRequest(chance.choice(RANDOM_KINDS), rank) for _ in range(count)]
        elif name == "all":
            requests += [FaultRequest(k, rank if KINDS[k].in_one_rank else None) for k in possible(nodes)] * count
        else:
            _check(name, rank, nodes)
            requests += [FaultRequest(name, rank)] * count
    return requests


def possible(nodes: int) -> list[str]:
    """The kinds that are possible with this number of nodes."""
    return [name for name, kind in KINDS.items() if kind.way != "nodes" or nodes > 1]


def _check(name: str, rank: int | None, nodes: int) -> None:
    if name not in KINDS:
        near = difflib.get_close_matches(name, [*KINDS, "random", "all"], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}, random and all"
        raise JobError(f"--faults: {name!r} is not known; {hint}")
    if KINDS[name].way == "nodes" and nodes < 2:
        raise JobError(f"--faults: {name} needs a run of at least 2 nodes, and this one has {nodes}; give --nodes 2")
    if rank is not None and not KINDS[name].in_one_rank:
        raise JobError(f"--faults: {name}@{rank}: {name} does not affect a single rank; write {name}")


def schedule(requests: Iterable[FaultRequest], *, seed: int, world: int, steps: int) -> list[Fault]:
    """Distribute faults over a run's steps, deterministic by seed, with enough steps to recover before the next.

    Faults that need a history come last; otherwise the requested order is kept.
    """
    wanted = sorted(requests, key=lambda w: KINDS[w.kind].history)
    chance = random.Random(f"{seed} moments")
    needed = FIRST_FAULT_STEP
    for request in wanted:
        needed = max(needed, KINDS[request.kind].history) + KINDS[request.kind].room
    if steps < needed:
        what = f"{len(wanted)} faults need" if len(wanted) != 1 else f"the fault {wanted[0].kind} needs"
        raise JobError(
            f"train.steps is {steps}, and {what} at least {needed} steps for the faults and recovery; "
            "raise train.steps or ask for fewer"
        )
    found, free = [], FIRST_FAULT_STEP
    for i, request in enumerate(wanted):
        kind = KINDS[request.kind]
        earliest = max(free, kind.history)
        latest = _latest(wanted[i:], steps)
        step = earliest + int(chance.uniform(0.3, 1.0) * (latest - earliest) / (len(wanted) - i))
        found.append(draw(i, request, step, world, chance))
        free = step + kind.room
    ends = [f.step for f in found[1:]] + [steps]
    return [replace(f, latest=end - KINDS[f.kind].room) for f, end in zip(found, ends, strict=True)]


def draw(number: int, request: FaultRequest, step: int, world: int, chance: random.Random) -> Fault:
    """Choose at random what a request leaves open."""
    kind = KINDS[request.kind]
    rank = chance.randrange(world) if request.rank is None else request.rank
    return Fault(
        number, request.kind, rank if kind.in_one_rank else None, chance.choice(kind.phases), step, chance.random()
    )


def burst_kills(fault: Fault, world: int) -> list[tuple[int, float]]:
    """The kills of a burst: the rank of each, and the seconds after the kill before it."""
    chance = random.Random(f"{fault.moment} burst")
    kills = [
        (chance.randrange(world), chance.uniform(0.0, BURST_SPACING_S)) for _ in range(chance.randint(*BURST_KILLS))
    ]
    return [(kills[0][0], 0.0), *kills[1:]]


def _latest(rest: list[FaultRequest], steps: int) -> int:
    """The latest step of the first of these faults that leaves enough steps for all."""
    return steps - sum(KINDS[w.kind].room for w in rest)


def order_of(fault: Fault, at_step: int) -> dict[str, int | str | float | None]:
    """The order that a rank reads."""
    return {
        "id": fault.number, "kind": fault.kind, "rank": fault.rank, "phase": fault.phase, "step": at_step,
        "moment": fault.moment,
    }  # fmt: skip


def reports_fault(kind: str, event: Mapping[str, object]) -> bool:
    """Whether a line of events.jsonl names this kind of fault."""
    return event.get("event") == "fault" and event.get("fault") in KINDS[kind].seen_as
