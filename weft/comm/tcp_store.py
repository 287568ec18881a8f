"""A TCPStore whose server listens at one address; torch's own listens at all addresses of the machine."""

from __future__ import annotations

import datetime
import ipaddress
import socket

import torch.distributed as dist

from weft.hardware.network import own_address
from weft.hardware.rank_environment import rank_info
from weft.job.errors import MachineError

BACKLOG = 2048


def tcp_store(host: str, port: int, is_master: bool, timeout: datetime.timedelta) -> dist.TCPStore:
    """The store of all ranks at host:port (0: any free port), served by the master at that address only.

    Where the master's own host name means loopback (Debian's 127.0.1.1) and there are other hosts, it listens at the
    address on their network instead. A loopback address as such means that all ranks are on one machine.
    """
    here = rank_info()
    world = here.world
    if not is_master:
        return dist.TCPStore(host, port, world, is_master=False, timeout=timeout)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if here.local_world < world and _is_name(host) and ipaddress.ip_address(address[0]).is_loopback:
            family, address = socket.AF_INET, (own_address(), port)
        server = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise MachineError(f"rank 0 cannot listen at MASTER_ADDR={host}, port {port}: {error}") from error
    at, port = server.getsockname()[:2]
    return dist.TCPStore(
        at, port, world, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=server.detach()
    )


def _is_name(host: str) -> bool:
    """Whether a host is given by its own name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False
