"""The interfaces of this machine, and which of them ranks talk through."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import psutil

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "kube", "tun", "tap")
"""Prefixes of interfaces that lead to containers and not to other machines."""
ELSEWHERE = "192.0.2.1"
"""Reserved for examples (RFC 5737): the route to it is the default route."""


@dataclass(frozen=True)
class Interface:
    """One that is up and has an IPv4 address."""

    name: str
    address: str
    mbit: int
    """As the driver says; 0 where it says nothing."""

    @property
    def loopback(self) -> bool:
        return self.address.startswith("127.")

    @property
    def virtual(self) -> bool:
        return self.name.startswith(VIRTUAL)


@dataclass(frozen=True)
class Choice:
    """The interface that ranks of several hosts will use, and why."""

    name: str | None
    address: str | None
    why: str


def interfaces() -> list[Interface]:
    """Those that are up, in the order of the system."""
    stats = psutil.net_if_stats()
    return [
        Interface(name, a.address, stats[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for a in addresses
        if a.family == socket.AF_INET
    ]


def source_towards(address: str) -> str | None:
    """The address from which this machine would send to another; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            found: str = probe.getsockname()[0]
            return found
    except OSError:
        return None


def own_address() -> str:
    """Where other hosts reach this one: the address of the default route, else of the first real interface."""
    found = source_towards(ELSEWHERE)
    if found is not None:
        return found
    real = [i for i in interfaces() if not i.loopback]
    return next((i.address for i in sorted(real, key=lambda i: i.virtual)), "127.0.0.1")


def choose(environ: Mapping[str, str] = os.environ) -> Choice:
    """Which interface ranks of several hosts talk through: the one a person named, else the one that leads to the
    host where they meet (MASTER_ADDR), else the one of the default route, else the only real one."""
    found = interfaces()
    for variable in (GLOO, NCCL):
        named = environ.get(variable, "")
        if named and not named.startswith("^"):  # NCCL also takes ^docker0: any but this one
            first = named.lstrip("=").split(",")[0]
            match = next((i for i in found if i.name == first), None)
            return Choice(first, match.address if match else None, f"{variable}={named} says so")
    by_address = {i.address: i for i in found}
    master = environ.get("MASTER_ADDR")
    if master:
        towards = by_address.get(source_towards(master) or "")
        if towards is not None and not towards.loopback:
            return Choice(towards.name, towards.address, f"it leads to MASTER_ADDR={master}")
    real = [i for i in found if not i.loopback and not i.virtual]
    default = by_address.get(source_towards(ELSEWHERE) or "")
    if default is not None and not default.loopback:
        return Choice(default.name, default.address, "it carries the default route")
    if len(real) == 1:
        return Choice(real[0].name, real[0].address, "it is the only one that is up and leads anywhere")
    if not real:
        return Choice(None, None, "none but the loopback is up: only ranks of this machine can talk")
    names = ", ".join(i.name for i in real)
    return Choice(None, None, f"several are up ({names}) and no route says which")


def name_interface(environ: MutableMapping[str, str] = os.environ) -> Choice | None:
    """For ranks on several hosts: tell Gloo and NCCL which interface to use, unless a person did or it cannot be told.

    Gloo asks the resolver for this machine's own name, which on many systems is 127.0.1.1: other hosts then find no
    one there.
    """
    if environ.get(GLOO) and environ.get(NCCL):
        return None
    found = choose(environ)
    if found.name is None or found.address is None:
        return None
    environ.setdefault(GLOO, found.name)
    environ.setdefault(NCCL, found.name)
    return found


def stay_home(environ: MutableMapping[str, str]) -> None:
    """For ranks on one host: let Gloo and NCCL use the loopback, which no other host can reach."""
    for home in [i.name for i in interfaces() if i.loopback][:1]:
        environ.setdefault(GLOO, home)
        environ.setdefault(NCCL, home)
