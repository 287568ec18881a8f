"""A node's snapshots in its neighbour's memory: sent in the background, checked, kept until they are needed."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil

from weft.checkpoint.snapshot_file import Places, Sealed, find_sealed
from weft.planner.plan import AXES, Plan
from weft.wire.channel import Channel, Disconnected, Message, ProtocolError, open_channel

KEEP = 2
"""Steps of a rank that a neighbour keeps."""
SHARE = 0.25
"""Of the time, what sending may take: a large state is sent every few steps."""
ROOM = 0.5
"""Of the memory that is free, what one snapshot of a neighbour may take."""
IDLE_S = 3600.0
LOOK_S = 0.02


class Keeper:
    """The copies that this node keeps for others, as files of its own memory: held/ATTEMPT-RANK-STEP."""

    def __init__(self, memory: Path):
        self.folder = memory / "held"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def serve(self, channel: Channel, hello: Message) -> None:
        """Take in what one node sends."""
        while True:
            limit = int(psutil.virtual_memory().available * ROOM)
            message, text = channel.receive(IDLE_S, blob_limit=limit)
            places = Places.loads(text.decode("utf-8", "replace"))
            _, content = channel.receive(IDLE_S, blob_limit=limit)
            if places is None:
                raise ProtocolError("a snapshot of nobody knows what")
            self._keep(int(message["attempt"]), places, int(message["step"]), content)
            channel.send({"kept": message["step"]})

    def _keep(self, attempt: int, places: Places, step: int, content: bytearray) -> None:
        name = f"{attempt}-{places.rank}"
        (self.folder / f".{name}").write_bytes(content)
        (self.folder / f"{name}.json").write_text(places.dumps(), encoding="utf-8")
        (self.folder / f".{name}").replace(self.folder / f"{name}-{step}")
        for old_attempt, rank, old_step, path in held_files(self.folder):
            newer = sorted(s for a, r, s, _ in held_files(self.folder) if (a, r) == (attempt, rank) and s > old_step)
            if rank == places.rank and (old_attempt < attempt or len(newer) >= KEEP):
                path.unlink(missing_ok=True)

    def forget(self, before: int) -> None:
        """Drop what was kept of attempts before this one."""
        for path in self.folder.iterdir():
            if (number := path.name.lstrip(".").split("-")[0]).isdigit() and int(number) < before:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def held_files(folder: Path) -> list[tuple[int, int, int, Path]]:
    """Attempt, rank, step and path of every copy in a folder."""
    found = []
    for path in folder.glob("*-*-*"):
        parts = path.name.split("-")
        if len(parts) == 3 and all(part.isdigit() for part in parts):
            found.append((int(parts[0]), int(parts[1]), int(parts[2]), path))
    return found


def newest_whole(held: Iterable[tuple[int, int]], axes: Mapping[str, int]) -> int | None:
    """Of steps and ranks: the newest step all of whose shards are held. Ranks that differ only in dp_replicate hold the
    same."""
    ranks_at: dict[int, set[int]] = {}
    for step, rank in held:
        ranks_at.setdefault(step, set()).add(rank)
    places = list(product(*(range(axes[axis]) for axis in AXES)))
    copy = AXES.index("dp_replicate")
    like = [tuple(x for i, x in enumerate(place) if i != copy) for place in places]
    needed = set(like)
    whole = [step for step, ranks in ranks_at.items() if {like[r] for r in ranks if r < len(like)} == needed]
    return max(whole, default=None)


def needless(plan: Plan, nodes: Iterable[range]) -> bool:
    """Whether any node of these ranks may be lost and the others still hold all of the state: as replicas do. What a
    lost node's compression still owed is lost with it."""
    ranks = [set(node) for node in nodes]
    everyone = set().union(*ranks)
    return not plan.alone and all(
        newest_whole([(0, r) for r in everyone - node], plan.axes) is not None for node in ranks
    )


@dataclass(frozen=True)
class Errand:
    """What is to be sent where: the first step from `target` on that all of these ranks have."""

    attempt: int
    ranks: frozenset[int]
    node: int
    address: tuple[str, int]
    target: int


class Sender:
    """Sends the snapshots of this machine's ranks to whoever is the neighbour now; `kept` hears of what arrived."""

    def __init__(
        self,
        memory: Path,
        secret: bytes,
        errand: Callable[[], Errand | None],
        kept: Callable[[int], None],
        note: Callable[[str], None],
    ):
        self.memory, self._secret, self._errand, self._kept, self._note = memory, secret, errand, kept, note
        self._sent = (0, 0, 0)
        """Attempt, neighbour and step of the last that is known to be there."""
        self._closed = threading.Event()
        self._channel: tuple[tuple[str, int], Channel] | None = None
        self._noted = False
        threading.Thread(target=self._work, daemon=True, name="snapshots-out").start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(LOOK_S):
            errand = self._errand()
            if errand is None or (self._sent[:2] == (errand.attempt, errand.node) and self._sent[2] >= errand.target):
                continue
            ready = self._first(errand)
            if ready is None:
                continue
            began = time.monotonic()
            try:
                if self._send(errand.attempt, errand.address, ready):
                    self._sent = (errand.attempt, errand.node, ready[0].step)
                    self._kept(ready[0].step)
            except (OSError, ValueError) as error:
                self._hang_up()
                if not isinstance(error, Disconnected) and not self._noted:
                    self._noted = True
                    self._note(f"node {errand.node} does not keep this node's snapshots: {error}")
            self._closed.wait((time.monotonic() - began) * (1 / SHARE - 1))

    def _first(self, errand: Errand) -> list[Sealed] | None:
        """The snapshots to send."""
        ranks = errand.ranks
        by_step: dict[int, dict[int, Sealed]] = {}
        for sealed in find_sealed(self.memory):
            by_step.setdefault(sealed.step, {})[sealed.rank] = sealed
        whole = [step for step, have in by_step.items() if ranks <= have.keys() and step >= errand.target]
        return [by_step[min(whole)][rank] for rank in sorted(ranks)] if whole else None

    def _send(self, attempt: int, address: tuple[str, int], ready: list[Sealed]) -> bool:
        for sealed in ready:
            places = Places.read(self.memory / f"places-{sealed.rank}.json")
            content = sealed.copy()
            if content is None or places is None or places.attempt != attempt:
                return False
            channel = self._dial(address, attempt)
            channel.send({"attempt": attempt, "step": sealed.step}, places.dumps().encode())
            channel.send({}, content, timeout_s=60.0)
            channel.receive(10.0)
        return True

    def _dial(self, address: tuple[str, int], attempt: int) -> Channel:
        if self._channel is None or self._channel[0] != address:
            self._hang_up()
            channel = open_channel(address, self._secret)
            channel.send({"purpose": "copy", "attempt": attempt})
            self._channel = (address, channel)
        return self._channel[1]

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel[1].close()
            self._channel = None
