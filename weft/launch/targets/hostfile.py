"""The hosts of the targets ssh and mpi: a hostfile with a line `host slots=8` for each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.job.cluster import Cluster
from weft.job.errors import JobError

LINE = re.compile(r"(?P<name>[A-Za-z0-9_][\w.@-]*)(\s+slots\s*=\s*(?P<slots>\d+))?(\s+max[_-]slots\s*=\s*\d+)?")


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
            text = Path(hostfile).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"cluster.hostfile={hostfile} cannot be read: {error}") from None
        lines += [(f"{hostfile} line {n}", line) for n, line in enumerate(text.splitlines(), 1)]
    found: dict[str, int] = {}
    for where, line in lines:
        if not (content := line.partition("#")[0].strip()):
            continue
        match = LINE.fullmatch(content)
        slots = int(match["slots"] or default_slots) if match else 0
        if match is None or not slots:
            raise JobError(f"{where}: {content!r} is not a host; write for example `node1 slots=8`")
        found[match["name"]] = found.get(match["name"], 0) + slots
    if not found:
        raise JobError("there are no hosts; give cluster.hostfile=FILE with lines such as `node1 slots=8`")
    return [Host(name, slots) for name, slots in found.items()]


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
    if "nodes" in section:
        return section
    per_node = section.get("devices_per_node", 1)
    hosts = read_hosts(section.get("hostfile"), list(section.get("hosts", ())), per_node if per_node != "auto" else 1)
    return {**section, "nodes": len(hosts)}
