"""All parameter servers of a run as the chief sees them: one update, one snapshot, one version, or none at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.server.connections import Peer
from weft.server.shard import Holder, Shard
from weft.wire.channel import WireError


class Servers:
    """The chief's own shard, and links to the others'. Its caller holds the desk's lock."""

    def __init__(self, shard: Shard, count: int, connect: Callable[[str], Holder]):
        """`connect` reaches the shard at an address."""
        self.shard, self.connect = shard, connect
        self.holders: list[Holder | None] = [shard] + [None] * (count - 1)
        self.addresses: list[str] = [""] * count
        """By which workers reach each; the chief has none, since they are connected to it."""
        self.peers: dict[int, Peer] = {}

    @property
    def whole(self) -> bool:
        """Whether every server is here."""
        return all(h is not None for h in self.holders)

    def all(self) -> list[Holder]:
        return [h for h in self.holders if h is not None]

    def join(self, peer: Peer) -> None:
        """A server has come, or come again; what it holds is another version than the others'."""
        index, address = int(peer.about["index"]), str(peer.about["address"])
        self.holders[index] = self.connect(address)
        self.addresses[index], self.peers[index] = address, peer

    def leave(self, peer: Peer) -> int | None:
        """The number of a server that is gone; None if another has taken its place already."""
        index = int(peer.about["index"])
        if self.peers.get(index) is not peer:
            return None
        del self.peers[index]
        return index if self._drop(index) else None

    def _drop(self, index: int) -> bool:
        known, self.holders[index] = self.holders[index] is not None, None
        return known

    def silent(self) -> list[int]:
        """Those that do not answer, which are dropped."""
        found = []
        for index, holder in enumerate(self.holders):
            try:
                if holder is not None and holder is not self.shard:
                    holder.snapshots()
            except WireError:
                found.append(index)
        return [index for index in found if self._drop(index)]

    def call(self) -> None:
        """One that is still connected to us may have refused a request: reach it again."""
        for index in self.peers:
            if self.holders[index] is None:
                with contextlib.suppress(WireError):
                    self.holders[index] = self.connect(self.addresses[index])

    def read(self, what: str) -> dict[str, Tensor]:
        return {name: tensor for holder in self.all() for name, tensor in holder.read(what).items()}

    def snapshot(self, meta: dict[str, Any]) -> None:
        for holder in self.all():
            holder.snapshot(meta)

    def restore(self) -> dict[str, Any] | None:
        """Go back to the newest snapshot that all have in common; its meta, or None if there is none."""
        try:
            found = max(set.intersection(*(set(h.snapshots()) for h in self.all())), default=None)
            metas = [h.restore(found) for h in self.all()] if found is not None else [None]
            return metas[0]
        except WireError:
            return None
