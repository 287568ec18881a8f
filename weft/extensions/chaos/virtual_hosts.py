"""Virtual hosts on one machine: network namespaces on a bridge, with links that can be limited or cut.

Uses real sockets and interfaces. Needs root on Linux, `ip` and `tc` (iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.job.errors import MachineError

BRIDGE, LINK = "weft0", "eth0"
BURST_S = 0.005
"""Burst of a limited link in seconds of its rate."""


def check_hosts() -> None:
    """Raise a MachineError where virtual hosts cannot be created."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise MachineError(f"hosts on one machine need {' and '.join(missing)}: install iproute2")
    if os.geteuid() != 0:
        raise MachineError("hosts on one machine are network namespaces, which only root may make; run as root")


class VirtualHosts:
    """`count` hosts with the addresses 10.73.N.1 and up; removed on exit with all their processes."""

    def __init__(self, count: int, mbit: float | None = None):
        check_hosts()
        self.count = count
        self.names: list[str] = []
        self.net = os.getpid() % 200 + 20  # concurrent experiments are in separate namespaces
        self.switch = f"weft-{os.getpid()}-sw"
        self.started: list[subprocess.Popen[Any]] = []
        try:
            self._build()
            if mbit is not None:
                for host in range(count):
                    self.shape(host, mbit)
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _add(self.switch)
        _ip(self.switch, "link", "add", BRIDGE, "type", "bridge")
        _ip(self.switch, "link", "set", BRIDGE, "up")
        for host in range(self.count):
            name = f"weft-{os.getpid()}-{host}"
            _add(name)
            self.names.append(name)
            port = f"port{host}"
            _ip(name, "link", "add", LINK, "type", "veth", "peer", "name", port, "netns", self.switch)
            _ip(self.switch, "link", "set", port, "master", BRIDGE, "up")
            _ip(name, "addr", "add", f"{self.address(host)}/24", "dev", LINK)
            _ip(name, "link", "set", LINK, "up")
            _ip(name, "link", "set", "lo", "up")

    def address(self, host: int) -> str:
        """A host's address."""
        return f"10.73.{self.net}.{host + 1}"

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host like subprocess.Popen, with the interface set for Gloo and NCCL."""
        chosen = {**(os.environ if env is None else env), "GLOO_SOCKET_IFNAME": LINK, "NCCL_SOCKET_IFNAME": LINK}
        line = ["ip", "netns", "exec", self.names[host], *command]  # execs, so the pid is the command's own
        process = subprocess.Popen(line, env=chosen, **options)
        self.started.append(process)
        return process

    def shape(self, host: int, mbit: float | None) -> None:
        """Limit a host's link to so many Mbit/s in both directions; None removes the limit."""
        for space, link in ((self.names[host], LINK), (self.switch, f"port{host}")):
            _run("tc", "-n", space, "qdisc", "del", "dev", link, "root", check=False)
            if mbit is not None:
                burst = max(16_000, int(mbit * 1e6 / 8 * BURST_S))
                _run(
                    "tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", "rate", f"{mbit:g}mbit",
                    "burst", str(burst), "latency", "200ms",
                )  # fmt: skip

    def cut(self, host: int) -> None:
        """Disconnect a host from the network."""
        _ip(self.switch, "link", "set", f"port{host}", "down")

    def join(self, host: int) -> None:
        """Reconnect a host."""
        _ip(self.switch, "link", "set", f"port{host}", "up")

    def sent(self, host: int) -> int:
        """Bytes sent by a host, from its interface counter."""
        counter = f"/sys/class/net/{LINK}/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.names[host], "cat", counter))

    def processes(self, host: int) -> list[int]:
        """Pids of all processes on a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.names[host]).split()]

    def kill(self, host: int) -> None:
        """Kill all processes on a host."""
        for pid in self.processes(host):
            _run("kill", "-9", str(pid), check=False)

    def close(self) -> None:
        for host in range(len(self.names)):
            self.kill(host)
        for process in self.started:
            process.wait()
        for name in (*self.names, self.switch):
            if Path("/run/netns", name).exists():
                _run("ip", "netns", "del", name, check=False)
        self.names = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _add(name: str) -> None:
    _run("ip", "netns", "del", name, check=False)  # left by a killed process with the same pid
    _run("ip", "netns", "add", name)


def _ip(space: str, *words: str) -> None:
    _run("ip", "-n", space, *words)


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise MachineError(f"{' '.join(words)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
