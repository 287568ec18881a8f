"""All parameter servers of a run as one: updates, snapshots and restores apply to every server or to none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.extensions.server.connections import Peer
from weft.extensions.server.server_shard import Shard, ShardHandle
from weft.wire.channel import WireError


class ServerGroup:
    """The chief's own shard and links to the others. The caller holds the coordinator's lock."""

    def __init__(self, shard: Shard, count: int, connect: Callable[[str], ShardHandle]):
        """`connect` reaches the shard at an address."""
        self.shard, self.connect = shard, connect
        self.holders: list[ShardHandle | None] = [shard] + [None] * (count - 1)
        self.addresses: list[str] = [""] * count
        """Where workers reach each server; empty for the chief, which they are already connected to."""
        self.peers: dict[int, Peer] = {}

    @property
    def complete(self) -> bool:
        """Whether every server is connected."""
        return all(h is not None for h in self.holders)

    def all(self) -> list[ShardHandle]:
        return [h for h in self.holders if h is not None]

    def join(self, peer: Peer) -> None:
        """Add a server that started or restarted; its version differs from the others'."""
        index, address = int(peer.about["index"]), str(peer.about["address"])
        self.holders[index] = self.connect(address)
        self.addresses[index], self.peers[index] = address, peer

    def leave(self, peer: Peer) -> int | None:
        """Index of a server that disconnected; None if it has already been replaced."""
        index = int(peer.about["index"])
        if self.peers.get(index) is not peer:
            return None
        del self.peers[index]
        return index if self._drop(index) else None

    def _drop(self, index: int) -> bool:
        known, self.holders[index] = self.holders[index] is not None, None
        return known

    def drop_unresponsive(self) -> list[int]:
        """Drop the servers that do not answer; returns their indices."""
        found = []
        for index, holder in enumerate(self.holders):
            try:
                if holder is not None and holder is not self.shard:
                    holder.snapshots()
            except WireError:
                found.append(index)
        return [index for index in found if self._drop(index)]

    def reconnect(self) -> None:
        """Reconnect to dropped servers that are still registered."""
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
        """Restore the newest snapshot that all servers have; returns its meta, or None if there is none."""
        try:
            found = max(set.intersection(*(set(h.snapshots()) for h in self.all())), default=None)
            metas = [h.restore(found) for h in self.all()] if found is not None else [None]
            return metas[0]
        except WireError:
            return None
