"""The network interfaces of this machine, and the choice of one for communication between ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import psutil

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "kube", "tun", "tap")
"""Name prefixes of interfaces to containers instead of other machines."""
EXAMPLE_ADDRESS = "192.0.2.1"
"""Reserved for documentation (RFC 5737), so the route to it is the default route."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and has an IPv4 address."""

    name: str
    address: str
    mbit: int
    """Speed reported by the driver; 0 if unknown."""

    @property
    def loopback(self) -> bool:
        return self.address.startswith("127.")

    @property
    def virtual(self) -> bool:
        return self.name.startswith(VIRTUAL)


@dataclass(frozen=True)
class InterfaceChoice:
    """The interface for ranks on several hosts, and the reason."""

    name: str | None
    address: str | None
    why: str


def interfaces() -> list[Interface]:
    """The interfaces that are up, in the system's order."""
    stats = psutil.net_if_stats()
    return [
        Interface(name, a.address, stats[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for a in addresses
        if a.family == socket.AF_INET
    ]


def source_towards(address: str) -> str | None:
    """The local address of the route to another machine; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            found: str = probe.getsockname()[0]
            return found
    except OSError:
        return None


def own_address() -> str:
    """The address of this machine for other hosts: that of the default route, else of the first physical interface."""
    found = source_towards(EXAMPLE_ADDRESS)
    if found is not None:
        return found
    real = [i for i in interfaces() if not i.loopback]
    return next((i.address for i in sorted(real, key=lambda i: i.virtual)), "127.0.0.1")


def choose(environ: Mapping[str, str] = os.environ) -> InterfaceChoice:
    """The interface for ranks on several hosts: the one set by the user, else that of the route to MASTER_ADDR, else
    that of the default route, else the only physical one."""
    found = interfaces()
    for variable in (GLOO, NCCL):
        named = environ.get(variable, "")
        if named and not named.startswith("^"):  # NCCL also accepts ^docker0: any interface but this one
            first = named.lstrip("=").split(",")[0]
            match = next((i for i in found if i.name == first), None)
            return InterfaceChoice(first, match.address if match else None, f"set by {variable}={named}")
    by_address = {i.address: i for i in found}
    master = environ.get("MASTER_ADDR")
    if master:
        towards = by_address.get(source_towards(master) or "")
        if towards is not None and not towards.loopback:
            return InterfaceChoice(towards.name, towards.address, f"on the route to MASTER_ADDR={master}")
    real = [i for i in found if not i.loopback and not i.virtual]
    default = by_address.get(source_towards(EXAMPLE_ADDRESS) or "")
    if default is not None and not default.loopback:
        return InterfaceChoice(default.name, default.address, "on the default route")
    if len(real) == 1:
        return InterfaceChoice(real[0].name, real[0].address, "the only physical interface that is up")
    if not real:
        return InterfaceChoice(None, None, "only loopback is up: ranks on this machine only")
    names = ", ".join(i.name for i in real)
    return InterfaceChoice(None, None, f"several interfaces are up ({names}) and no route selects one")


def export_interface(environ: MutableMapping[str, str] = os.environ) -> InterfaceChoice | None:
    """For ranks on several hosts: set the interface of Gloo and NCCL, unless the user did or it cannot be determined.

    Gloo would resolve this machine's host name, which on many systems is 127.0.1.1 and not reachable from other hosts.
    """
    if environ.get(GLOO) and environ.get(NCCL):
        return None
    found = choose(environ)
    if found.name is None or found.address is None:
        return None
    environ.setdefault(GLOO, found.name)
    environ.setdefault(NCCL, found.name)
    return found


def use_loopback(environ: MutableMapping[str, str]) -> None:
    """For ranks on one host: make Gloo and NCCL use the loopback interface, which other hosts cannot reach."""
    for name in [i.name for i in interfaces() if i.loopback][:1]:
        environ.setdefault(GLOO, name)
        environ.setdefault(NCCL, name)
