"""States on their way: a piece's states are fetched to the device ahead of its update and stored behind it.

host or disk  ──fetch──▶  slot on the device ──▶ update ──▶ slot ──store──▶  host or disk
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.memory.disk_states import DiskStates
from weft.memory.host_copies import Copies, Event
from weft.memory.host_memory import padded
from weft.optim.pieces import Piece
from weft.planner.engine_constants import STREAM_SLOTS

KINDS = {"low": "master", "ema": "average"}
"""Kinds of state in reports; the optimizer's own are moments."""


@dataclass
class _Slot:
    memory: Tensor
    free_after: list[Event] = field(default_factory=list)


class StateStream:
    """The pieces whose states are on their way to the device or back, in the fixed order of their updates."""

    def __init__(
        self, pieces: list[Piece], disk: DiskStates, copies: Copies, device: torch.device, slot_bytes: int
    ):  # fmt: skip
        self.pieces, self.disk, self.copies = pieces, disk, copies
        self.moved: Counter[tuple[str, str, str, str]] = Counter()
        """Bytes copied, by kind, from, to, and phase."""
        self.phase = "update"
        self.order = [piece for piece in pieces if piece.streamed]
        size = max((sum(padded(t.bytes) for t in piece.streamed) for piece in self.order), default=0)
        count = min(max(STREAM_SLOTS, slot_bytes // size), len(self.order)) if size else 0
        self.slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(count)]
        self.free = deque(self.slots)
        self.ahead: deque[tuple[Piece, _Slot, Event]] = deque()
        """Pieces whose states are on their way to the device, in order."""
        self.here: _Slot | None = None
        """The slot of the piece that is being updated."""

    def arrive(self, piece: Piece) -> None:
        """Wait for the states of a piece, and bind them."""
        if not piece.streamed:
            return
        if not self.ahead or self.ahead[0][0] is not piece:
            self.drop()
            self._fetch_ahead(self.order.index(piece))
        _, self.here, arrived = self.ahead.popleft()
        self.copies.wait(self.disk.arrived(arrived))
        for state, values in zip(piece.streamed, self._views(piece, self.here), strict=True):
            state.bind(values)

    def leave(self, piece: Piece) -> None:
        """Copy the states of an updated piece home, and fetch those of the next pieces."""
        if not piece.streamed:
            return
        slot, self.here = self.here, None
        assert slot is not None
        updated = self.copies.mark()
        views = dict(zip(map(id, piece.streamed), self._views(piece, slot), strict=True))
        pairs = [(state.host, views[id(state)]) for state in piece.streamed if state.host is not None]
        piece.stored = self.copies.store(pairs, [updated])
        slot.free_after = [piece.stored]
        if piece.disk:
            number = self.pieces.index(piece)
            slot.free_after.append(self.disk.store(number, [views[id(s)] for s in piece.disk], self.copies, updated))
        self.free.append(slot)
        for state in piece.streamed:
            kind, home = KINDS.get(state.kind, "moments"), "disk" if state.host is None else "host"
            self.moved[kind, home, "device", self.phase] += state.bytes
            self.moved[kind, "device", home, self.phase] += state.bytes
        self._fetch_ahead((self.order.index(piece) + 1) % len(self.order))

    def _fetch_ahead(self, first: int) -> None:
        """Fetch the pieces from `first` on, or after those that are already on their way, while slots are free."""
        if self.ahead:
            first = self.order.index(self.ahead[-1][0]) + 1
        while self.free and len(self.ahead) < max(1, len(self.slots) - 1):
            piece, slot = self.order[first % len(self.order)], self.free.popleft()
            first += 1
            after = [self.disk.arrived(e) for e in (*slot.free_after, piece.stored) if e is not None]
            views = dict(zip(map(id, piece.streamed), self._views(piece, slot), strict=True))
            pairs = [(views[id(state)], state.host) for state in piece.streamed if state.host is not None]
            event = self.copies.fetch(pairs, after)
            if piece.disk:
                number = self.pieces.index(piece)
                event = self.disk.fetch(number, [views[id(s)] for s in piece.disk], self.copies, [*after, event])
            self.ahead.append((piece, slot, event))

    def _views(self, piece: Piece, slot: _Slot) -> list[Tensor]:
        out, first = [], 0
        for state in piece.streamed:
            out.append(slot.memory[first : first + state.bytes].view(state.stored_dtype).view(state.stored_shape))
            first += padded(state.bytes)
        return out

    def drop(self) -> None:
        """Forget what is on its way to the device: the states at home may have changed."""
        while self.ahead:
            _, slot, event = self.ahead.popleft()
            self.copies.finish(self.disk.arrived(event))
            slot.free_after = []
            self.free.append(slot)

    def finish(self) -> None:
        """Wait until all states are at home."""
        for piece in self.pieces:
            if piece.stored is not None:
                self.copies.finish(piece.stored)
        self.disk.finish()
        self.drop()
