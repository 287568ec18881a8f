"""Past use of the machine by each user, which decays: who used less goes first at equal priority."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from weft.extensions.queue.atomic_files import read_public, write_public
from weft.extensions.queue.records import Capacity, ClaimRecord, QueueSettings


def share_of_machine(claim: ClaimRecord, machine: Capacity) -> float:
    """The largest fraction of one resource that a claim holds, whether or not its record says that it asked for it."""
    asked = claim.request
    parts = (
        (max(asked.gpus, len(claim.gpus)) * asked.share, len(machine.gpus)),
        (max(asked.cores, len(claim.cores)), len(machine.cores)), (asked.memory_gib, machine.memory_gib),
    )  # fmt: skip
    return max((amount / has for amount, has in parts if has), default=0.0)


def used_s(claim: ClaimRecord, machine: Capacity, now: float) -> float:
    """Machine seconds that a claim has used until a time."""
    return max(0.0, now - claim.since) * share_of_machine(claim, machine) if claim.held else 0.0


def decay(seconds: float, at: float, now: float, half_life_s: float) -> float:
    """What is left of past use that was counted at a time."""
    return seconds * math.exp2(-max(0.0, now - at) / half_life_s)


class UsageFile:
    """Past use of one user, in machine seconds: claims that have ended."""

    def __init__(self, folder: Path, uid: int, half_life_s: float):
        self.path, self.uid, self.half_life_s = folder / f"{uid}.json", uid, half_life_s
        try:
            found = json.loads(read_public(self.path, uid))
            self.seconds, self.at = float(found["seconds"]), float(found["at"])
            self.merged = [str(claim) for claim in found["merged"]]
            if not (math.isfinite(self.at) and 0 <= self.seconds < math.inf):
                raise ValueError(self.seconds)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            self.seconds, self.at, self.merged = 0.0, 0.0, []

    def decayed(self, now: float) -> float:
        return decay(self.seconds, self.at, now, self.half_life_s)

    def add(self, claims: Iterable[ClaimRecord], machine: Capacity, now: float) -> None:
        """Add ended claims. Their records are deleted afterwards; `merged` keeps them from being added twice if this
        process is killed in between."""
        claims = list(claims)
        new = [claim for claim in claims if claim.id not in self.merged]
        self.seconds = self.decayed(now) + sum(used_s(claim, machine, claim.seen) for claim in new)
        self.at, self.merged = now, [claim.id for claim in claims]
        content = {"seconds": self.seconds, "at": self.at, "merged": self.merged}
        write_public(self.path, json.dumps(content), self.uid)


def weighted_usage(
    folder: Path, settings: QueueSettings, live: Iterable[ClaimRecord], ended: Iterable[ClaimRecord],
    names: dict[int, str], now: float, remembered: dict[int, tuple[float, float]],
) -> dict[int, float]:  # fmt: skip
    """Past use of each user divided by the user's weight: files, claims held now, and ended ones not yet added.

    Users own their files, so `remembered` keeps the machine seconds that this process has seen of each user, and when.
    A user's use falls no faster than they decay. It is updated.
    """
    half_life_s = settings.half_life_hours * 3600
    files = {uid: UsageFile(folder, uid, half_life_s) for uid in names}
    usage = {uid: file.decayed(now) for uid, file in files.items()}
    for claim in ended:
        if claim.id not in files[claim.uid].merged:
            usage[claim.uid] += used_s(claim, settings.machine, claim.seen)
    for claim in live:
        usage[claim.uid] += used_s(claim, settings.machine, now)
    for uid in usage:
        usage[uid] = max(usage[uid], decay(*remembered.get(uid, (0.0, now)), now, half_life_s))
        remembered[uid] = usage[uid], now
    return {uid: seconds / settings.weights.get(names[uid], 1.0) for uid, seconds in usage.items()}


def past_usage(folder: Path, settings: QueueSettings, now: float) -> dict[int, float]:
    """Machine seconds of ended claims of every user who has any."""
    users = [int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()]
    files = (UsageFile(folder, uid, settings.half_life_hours * 3600) for uid in users)
    return {file.uid: file.decayed(now) for file in files if file.seconds}
