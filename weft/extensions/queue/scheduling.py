"""Which waiting claims may start: by priority, fair share and age; a smaller claim does not pass one that waits."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from weft.extensions.queue.records import Capacity, ClaimRecord, Request

PERCENT = 100
"""Shares of GPUs are added in whole percent, without rounding errors."""
MEMORY_TOLERANCE_GIB = 1e-6


@dataclass(frozen=True)
class Grant:
    """The GPUs and cores that a waiting claim may take now."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """Why a claim waits."""

    position: int
    """From 1, in the order of the queue."""
    reason: str


@dataclass
class FreeResources:
    """What no claim holds."""

    gpus: dict[str, int]
    """Free percent of each GPU."""
    cores: list[int]
    memory_gib: float

    @classmethod
    def after(cls, machine: Capacity, held: Iterable[ClaimRecord]) -> FreeResources:
        free = cls({gpu.uuid: PERCENT for gpu in machine.gpus}, list(machine.cores), machine.memory_gib)
        for claim in held:
            free.take(claim.request, Grant(claim.gpus, claim.cores))
        return free

    def take(self, request: Request, grant: Grant) -> None:
        for uuid in grant.gpus:
            self.gpus[uuid] = self.gpus.get(uuid, PERCENT) - round(request.share * PERCENT)
        self.cores = [core for core in self.cores if core not in grant.cores]
        self.memory_gib -= request.memory_gib

    def best(self, request: Request) -> Grant:
        """The devices nearest to a request: all that it asks for, or as many as are free."""
        wanted = round(request.share * PERCENT)
        fitting = [uuid for uuid, percent in self.gpus.items() if percent >= wanted]
        fitting.sort(key=lambda uuid: self.gpus[uuid])  # fill GPUs that are shared already first
        return Grant(tuple(fitting[: request.gpus]), tuple(self.cores[: request.cores]))

    def missing(self, request: Request) -> str:
        """What is not free of a request; empty if all of it is."""
        grant = self.best(request)
        words = []
        if len(grant.gpus) < request.gpus:
            words.append(f"{len(grant.gpus)} of {request.gpus} GPUs free")
        if len(grant.cores) < request.cores:
            words.append(f"{len(grant.cores)} of {request.cores} cores free")
        if self.memory_gib + MEMORY_TOLERANCE_GIB < request.memory_gib:
            words.append(f"{max(0.0, self.memory_gib):.3g} of {request.memory_gib:.3g} GiB of memory free")
        return ", ".join(words)


@dataclass
class ClaimSchedule:
    """What happens to each waiting claim."""

    granted: dict[str, Grant] = field(default_factory=dict)
    waiting: dict[str, Wait] = field(default_factory=dict)


def make_schedule(
    machine: Capacity,
    claims: Iterable[ClaimRecord],
    usage: Mapping[int, float],
    describe: Callable[[ClaimRecord], str] = lambda claim: claim.id,
    lapsed: Container[str] = (),
) -> ClaimSchedule:
    """Decide for all live claims. `usage`: weighted past use of each user; less goes first at equal priority. `lapsed`:
    claims that go last, because they did not take what was granted to them.

    A claim that has to wait keeps what is free of its request, so that smaller ones behind it cannot starve it.
    """
    claims = list(claims)
    held = [claim for claim in claims if claim.held]
    free = FreeResources.after(machine, held)
    order = sorted(
        (claim for claim in claims if not claim.held),
        key=lambda claim: (claim.id in lapsed, -claim.priority, usage.get(claim.uid, 0.0), claim.created, claim.id),
    )
    result = ClaimSchedule()
    first_waiting: ClaimRecord | None = None
    for claim in order:
        missing = free.missing(claim.request)
        grant = free.best(claim.request)
        if not missing:
            result.granted[claim.id] = grant
        else:
            if first_waiting is not None and not FreeResources.after(machine, held).missing(claim.request):
                reason = f"behind {describe(first_waiting)}"
            else:
                holders = ", ".join(describe(other) for other in held) or "claims before it"
                reason = f"{missing}; held by {holders}"
            result.waiting[claim.id] = Wait(len(result.waiting) + 1, reason)
            first_waiting = first_waiting or claim
        free.take(claim.request, grant)
    return result


def impossible(request: Request, machine: Capacity, min_share: float) -> str:
    """Why a request can never be granted; empty if it can."""
    if request.gpus and not min_share <= request.share <= 1:
        allowed = f"shares from {min_share:g} to 1" if min_share < 1 else "whole GPUs only"
        return f"a share of {request.share:g} of a GPU is asked for, and this queue allows {allowed}"
    asked = {"GPUs": request.gpus, "cores": request.cores, "GiB of memory": request.memory_gib}
    has = {"GPUs": len(machine.gpus), "cores": len(machine.cores), "GiB of memory": machine.memory_gib}
    for what, amount in asked.items():
        if not amount <= has[what] + MEMORY_TOLERANCE_GIB:  # not a number is too much
            return f"{amount:g} {what} are asked for, and this machine's queue has {has[what]:g}"
    return ""
