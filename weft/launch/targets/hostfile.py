"""The hosts of the targets ssh and mpi: a hostfile with a line `host slots=8` for each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from weft.job.cluster import Cluster
from weft.job.errors import JobError
from weft.job.files.text_file import MAX_BYTES

NAME = re.compile(
    r"([A-Za-z0-9_][\w.-]*@)?([A-Za-z0-9_][\w.-]*|(?P<ipv6>[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*(%\w+)?))"
)
EXAMPLE = "write for example `node1 slots=8`"


@dataclass(frozen=True)
class Host:
    """A host and the ranks it can run."""

    name: str
    slots: int

    def line(self) -> str:
        return f"{self.name} slots={self.slots}"


def read_hosts(hostfile: str | None, hosts: list[str], default_slots: int = 1) -> list[Host]:
    """The hosts of a hostfile and of a list, in order; a host without slots has `default_slots`."""
    lines: list[tuple[str, str]] = [("cluster.hosts", text) for text in hosts]
    if hostfile is not None:
        try:
            with open(hostfile, encoding="utf-8-sig") as file:  # also a pipe, as of <(command)
                text = file.read(MAX_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"cluster.hostfile={hostfile} cannot be read: {error}") from None
        if len(text) > MAX_BYTES:
            raise JobError(f"cluster.hostfile={hostfile} has more than {MAX_BYTES // 2**20} MiB, which is too large")
        lines += [(f"{hostfile} line {n}", line) for n, line in enumerate(text.splitlines(), 1)]
    found: dict[str, int] = {}
    for where, line in lines:
        if not (content := line.partition("#")[0].strip()):
            continue
        host = _host(content, where, default_slots)
        found[host.name] = found.get(host.name, 0) + host.slots
    if not found:
        raise JobError("there are no hosts; give cluster.hostfile=FILE with lines such as `node1 slots=8`")
    return [Host(name, slots) for name, slots in found.items()]


def _host(content: str, where: str, default_slots: int) -> Host:
    """The host of a line without its comment."""
    name, *settings = re.sub(r"\s*=\s*", "=", content).split()
    name = name.replace("[", "").replace("]", "") if re.search(r"\[[^\]]*:.*\]$", name) else name
    if NAME.fullmatch(name) is None:
        if NAME.fullmatch(name.partition(":")[0]):
            raise JobError(
                f"{where}: {name} has a port; give it to ssh, by cluster.ssh.options=[-p, PORT] or a Host of ssh_config"
            )
        raise JobError(f"{where}: {content!r} is not a host; {EXAMPLE}")
    found: dict[str, int] = {}
    for setting in settings:
        key, _, value = setting.replace("max-slots", "max_slots").partition("=")
        if key not in ("slots", "max_slots") or key in found:
            raise JobError(f"{where}: {setting} is unknown or repeated; a host may have slots and max_slots, {EXAMPLE}")
        if not re.fullmatch(r"[0-9]{1,6}", value) or not int(value):
            raise JobError(f"{where}: {setting} is not a number of ranks from 1 to 999999; leave out hosts without any")
        found[key] = int(value)
    return Host(name, found.get("slots", default_slots))


def hosts_of(cluster: Cluster) -> list[Host]:
    """The hosts that a cluster uses: as many as nodes, each with at most cluster.devices_per_node ranks."""
    per_node = cluster.devices_per_node
    found = read_hosts(cluster.hostfile, cluster.hosts, 1 if per_node == "auto" else per_node)
    if len(found) < cluster.nodes:
        raise JobError(f"cluster.nodes={cluster.nodes}, but there are {len(found)} hosts: add lines to the hostfile")
    count = cluster.max_nodes or cluster.nodes
    if "devices_per_node" in cluster.model_fields_set and per_node != "auto":
        if small := next((h for h in found[:count] if h.slots < per_node), None):
            raise JobError(f"{small.name} has slots={small.slots}, fewer than cluster.devices_per_node={per_node}")
        return [Host(h.name, per_node) for h in found[:count]]
    return found[:count]


def with_hosts(section: dict[str, Any]) -> dict[str, Any]:
    """A `cluster` section whose number of nodes is that of its hosts, unless it is set."""
    hostfile, listed, per_node = (section.get(k) for k in ("hostfile", "hosts", "devices_per_node"))
    valid = isinstance(hostfile, str | None) and isinstance(listed, list | None)
    if "nodes" in section or not valid or not all(isinstance(host, str) for host in listed or ()):
        return section  # a wrong type is refused with the rest of the job
    hosts = read_hosts(hostfile, listed or [], per_node if isinstance(per_node, int) else 1)
    return {**section, "nodes": len(hosts)}
