"""This machine's node number, and the address at which other nodes reach it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from weft.job.errors import MachineError


@dataclass(frozen=True)
class NodeAddress:
    """A node's number, the number of nodes, and its address."""

    node: int
    count: int
    host: str

    @classmethod
    def from_env(cls, bind: str | None = None) -> NodeAddress | None:
        """Read from the environment of torchrun (one process a node), a scheduler or a person; None if not set."""
        env = os.environ
        for node, count in (("NODE_RANK", "NNODES"), ("RANK", "WORLD_SIZE")):
            if node in env and count in env:
                try:
                    alone = int(env[count]) == 1
                    host = bind or local_address(None if alone else env.get("MASTER_ADDR"))
                    place = cls(int(env[node]), int(env[count]), host)
                except ValueError:
                    raise MachineError(f"{node}={env[node]} and {count}={env[count]} must be numbers") from None
                if place.node < 0 or place.count < 1:
                    raise MachineError(
                        f"{node}={place.node} of {count}={place.count} is not a node number; numbers start at 0"
                    )
                return place
        return None


def local_address(master: str | None) -> str:
    """This machine's address on the route to MASTER_ADDR, or loopback without one."""
    if not master:
        return "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent: connect() only selects a route
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MachineError(f"MASTER_ADDR={master} cannot be reached from here: {error}") from None
