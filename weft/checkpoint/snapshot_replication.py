"""Replicates a node's snapshots to the memory of another node, in the background."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil

from weft.checkpoint.snapshot_file import SealedSnapshot, SnapshotLayout, find_sealed, own_tensors
from weft.planner.plan import AXES, Plan
from weft.wire.channel import Channel, Disconnected, Message, ProtocolError, open_channel

KEEP = 2
"""Steps of a rank that another node keeps."""
MAX_SENDING_SHARE = 0.25
"""Largest fraction of the time spent sending: a large state is sent every few steps."""
MAX_MEMORY_SHARE = 0.5
"""Largest fraction of the free memory for one snapshot of another node."""
IDLE_TIMEOUT_S = 3600.0
POLL_S = 0.02


class ReplicaStore:
    """The snapshots that this node keeps for others, as files in shared memory: held/ATTEMPT-RANK-STEP."""

    def __init__(self, memory: Path):
        self.folder = memory / "held"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def serve(self, channel: Channel, hello: Message) -> None:
        """Receive the snapshots of one node."""
        while True:
            limit = int(psutil.virtual_memory().available * MAX_MEMORY_SHARE)
            message, text = channel.receive(IDLE_TIMEOUT_S, blob_limit=limit)
            layout = SnapshotLayout.loads(text.decode("utf-8", "replace"))
            _, content = channel.receive(IDLE_TIMEOUT_S, blob_limit=limit)
            if layout is None:
                raise ProtocolError("a snapshot without a valid layout")
            self._keep(int(message["attempt"]), layout, int(message["step"]), content)
            channel.send({"kept": message["step"]})

    def _keep(self, attempt: int, layout: SnapshotLayout, step: int, content: bytearray) -> None:
        name = f"{attempt}-{layout.rank}"
        (self.folder / f".{name}").write_bytes(content)
        (self.folder / f"{name}.json").write_text(layout.dumps(), encoding="utf-8")
        (self.folder / f".{name}").replace(self.folder / f"{name}-{step}")
        for old_attempt, rank, old_step, path in held_files(self.folder):
            newer = sorted(s for a, r, s, _ in held_files(self.folder) if (a, r) == (attempt, rank) and s > old_step)
            if rank == layout.rank and (old_attempt < attempt or len(newer) >= KEEP):
                path.unlink(missing_ok=True)

    def forget(self, before: int) -> None:
        """Delete the snapshots of attempts before this one."""
        for path in self.folder.iterdir():
            if (number := path.name.lstrip(".").split("-")[0]).isdigit() and int(number) < before:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def held_files(folder: Path) -> list[tuple[int, int, int, Path]]:
    """Attempt, rank, step and path of every replica in a folder."""
    found = []
    for path in folder.glob("*-*-*"):
        parts = path.name.split("-")
        if len(parts) == 3 and all(part.isdigit() for part in parts):
            found.append((int(parts[0]), int(parts[1]), int(parts[2]), path))
    return found


def newest_complete(held: Iterable[tuple[int, int]], axes: Mapping[str, int]) -> int | None:
    """The newest step all of whose shards are among these (step, rank) pairs. Ranks that differ only in dp_replicate
    have the same shards."""
    ranks_at: dict[int, set[int]] = {}
    for step, rank in held:
        ranks_at.setdefault(step, set()).add(rank)
    positions = list(product(*(range(axes[axis]) for axis in AXES)))
    copy = AXES.index("dp_replicate")
    like = [tuple(x for i, x in enumerate(place) if i != copy) for place in positions]
    needed = set(like)
    whole = [step for step, ranks in ranks_at.items() if {like[r] for r in ranks if r < len(like)} == needed]
    return max(whole, default=None)


def survives_node_loss(plan: Plan, nodes: Iterable[range]) -> bool:
    """Whether, after the loss of any one node, the others hold all of the state except for what each rank holds alone,
    as replicas do."""
    ranks = [set(node) for node in nodes]
    everyone = set().union(*ranks)
    return not plan.alone and all(
        newest_complete([(0, r) for r in everyone - node], plan.axes) is not None for node in ranks
    )


@dataclass(frozen=True)
class ReplicationRequest:
    """What to send and where: the first step from `target` on that all of these ranks have; with `own_only`, only the
    tensors that no other rank holds."""

    attempt: int
    ranks: frozenset[int]
    node: int
    address: tuple[str, int]
    target: int
    own_only: bool = False


class ReplicaSender:
    """Sends the snapshots of this node's ranks as requested; calls `kept` with each step that arrived."""

    def __init__(
        self,
        memory: Path,
        secret: bytes,
        request: Callable[[], ReplicationRequest | None],
        kept: Callable[[int], None],
        note: Callable[[str], None],
        encrypt: bool = False,
    ):
        self.memory, self._secret, self._request, self._kept, self._note = memory, secret, request, kept, note
        self._encrypt = encrypt
        self._sent = (0, 0, 0)
        """Attempt, node and step of the last snapshot that was acknowledged."""
        self._closed = threading.Event()
        self._channel: tuple[tuple[str, int], Channel] | None = None
        self._noted = False
        threading.Thread(target=self._work, daemon=True, name="snapshots-out").start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(POLL_S):
            request = self._request()
            if request is None or (
                self._sent[:2] == (request.attempt, request.node) and self._sent[2] >= request.target
            ):
                continue
            ready = self._first(request)
            if ready is None:
                continue
            began = time.monotonic()
            try:
                if self._send(request, ready):
                    self._sent = (request.attempt, request.node, ready[0].step)
                    self._kept(ready[0].step)
            except (OSError, ValueError) as error:
                self._disconnect()
                if not isinstance(error, Disconnected) and not self._noted:
                    self._noted = True
                    self._note(f"node {request.node} does not keep this node's snapshots: {error}")
            self._closed.wait((time.monotonic() - began) * (1 / MAX_SENDING_SHARE - 1))

    def _first(self, request: ReplicationRequest) -> list[SealedSnapshot] | None:
        """The snapshots to send."""
        ranks = request.ranks
        by_step: dict[int, dict[int, SealedSnapshot]] = {}
        for sealed in find_sealed(self.memory):
            by_step.setdefault(sealed.step, {})[sealed.rank] = sealed
        whole = [step for step, have in by_step.items() if ranks <= have.keys() and step >= request.target]
        return [by_step[min(whole)][rank] for rank in sorted(ranks)] if whole else None

    def _send(self, request: ReplicationRequest, ready: list[SealedSnapshot]) -> bool:
        attempt = request.attempt
        for sealed in ready:
            layout = SnapshotLayout.read(self.memory / f"places-{sealed.rank}.json")
            content = sealed.copy()
            if content is None or layout is None or layout.attempt != attempt:
                return False
            content = own_tensors(content) if request.own_only else content
            channel = self._connect(request.address, attempt)
            channel.send({"attempt": attempt, "step": sealed.step}, layout.dumps().encode())
            channel.send({}, content, timeout_s=60.0)
            channel.receive(10.0)
        return True

    def _connect(self, address: tuple[str, int], attempt: int) -> Channel:
        if self._channel is None or self._channel[0] != address:
            self._disconnect()
            channel = open_channel(address, self._secret, encrypt=self._encrypt)
            channel.send({"purpose": "copy", "attempt": attempt})
            self._channel = (address, channel)
        return self._channel[1]

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel[1].close()
            self._channel = None
