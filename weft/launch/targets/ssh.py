"""The target `ssh`: a supervisor on each host of a hostfile, started over ssh."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from typing import Any

from weft.job.cluster import Cluster
from weft.job.errors import JobError, MachineError
from weft.launch.targets.hostfile import Host, hosts_of, with_hosts
from weft.launch.targets.process_target import ProcessTarget
from weft.launch.targets.ssh_client import HOSTS_FILE, start_node
from weft.launch.targets.target import LaunchRequest, Submission

CONNECT_S = 15
"""How long a connection may take."""
ANSWER_S = 300.0
"""How long a host may take to import weft, maybe from a cold network disk."""


class SshTarget(ProcessTarget):
    """Hosts that can be reached by ssh without a password, with a folder that all of them share."""

    name = "ssh"
    summary = "hosts of a hostfile, over ssh"
    fields = frozenset({"hostfile", "hosts", "interface", "python", "setup", "ssh", "workdir"})

    def complete(self, section: dict[str, Any]) -> dict[str, Any]:
        return with_hosts(section)

    def world(self, cluster: Cluster) -> int:
        return sum(host.slots for host in hosts_of(cluster)[: cluster.nodes])

    def build(self, request: LaunchRequest) -> Submission:
        nodes = [
            connected(request, node_of(request, host, environment, request.train_command("--nproc", str(host.slots))))
            for host, environment in zip(hosts_of(request.cluster), node_variables(request), strict=True)
        ]
        client = [sys.executable, "-m", "weft.launch.targets.ssh_client", str(request.launch_folder / HOSTS_FILE)]
        return Submission((tuple(client),), {HOSTS_FILE: json.dumps(nodes, indent=2)})

    def check(self, request: LaunchRequest, submission: Submission) -> list[str]:
        if shutil.which("ssh") is None:
            raise MachineError("there is no ssh here; install openssh-client")
        lines = []
        script = f"cd {shlex.quote(request.workdir)} && {shlex.quote(request.python)} -c 'import weft'"
        for host in hosts_of(request.cluster):
            try:
                done = subprocess.run(
                    [*ssh_command(request.cluster, host), script],
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise MachineError(f"{host.name}: no answer to `{script}` within {ANSWER_S:.0f} s") from None
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                raise MachineError(f"{host.name}: {last}")
            lines.append(f"{host.name} can be reached and has weft: {host.slots} ranks")
        return lines

    def run_on_nodes(self, request: LaunchRequest, command: list[str]) -> str:
        started = []
        for host, environment in zip(hosts_of(request.cluster), node_variables(request), strict=True):
            node = node_of(request, host, environment, command)
            started.append((host, start_node(node, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)))
        output = ""
        for host, process in started:
            assert process.stdout is not None
            text = process.stdout.read().decode(errors="replace")
            if process.wait():
                last = (text.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                raise MachineError(f"{host.name}: {last.removeprefix('weft: ')}")
            output += text
        return output


def ssh_command(cluster: Cluster, host: Host) -> list[str]:
    """The ssh command of a host, without a terminal and without questions."""
    ours = ("BatchMode=yes", "ServerAliveInterval=15", "ServerAliveCountMax=4", f"ConnectTimeout={CONNECT_S}")
    options = [word for option in ours for word in ("-o", option)]
    return [
        "ssh",
        *cluster.ssh.options,
        *options,
        "--",
        host.name,
    ]  # of an option that is repeated, ssh takes the first


def node_of(request: LaunchRequest, host: Host, environment: dict[str, str], arguments: list[str]) -> dict[str, Any]:
    """A node as ssh_client.py starts it: weft/launch/targets/remote_node.py with an environment and a command."""
    script = request.node_script(request.python, "-m", "weft.launch.targets.remote_node")
    command = [*ssh_command(request.cluster, host), f"exec bash -c {shlex.quote(script)} weft"]
    retry = request.cluster.max_nodes is not None
    return {"host": host.name, "environment": environment, "arguments": arguments, "command": command, "retry": retry}


def connected(request: LaunchRequest, node: dict[str, Any]) -> dict[str, Any]:
    """The node with a file that ssh makes once it is connected."""
    path = request.launch_folder / f"connected-{node['environment']['NODE_RANK']}"
    touch = f"touch {shlex.quote(str(path))}".replace("%", "%%")
    ssh, *words = node["command"]
    command = [ssh, "-o", "PermitLocalCommand=yes", "-o", f"LocalCommand={touch}", *words]
    return {**node, "command": command, "connected": str(path)}


def node_variables(request: LaunchRequest) -> list[dict[str, str]]:
    """NODE_RANK, NNODES and MASTER_ADDR of each host."""
    hosts = hosts_of(request.cluster)
    master = address_of(request.cluster, hosts[0])
    common = {"NNODES": str(len(hosts)), "MASTER_ADDR": master}
    return [{**common, "NODE_RANK": str(node)} for node in range(len(hosts))]


def address_of(cluster: Cluster, host: Host) -> str:
    """The name or address that ssh connects to for a host, which may be an alias of ssh_config."""
    try:
        done = subprocess.run(["ssh", "-G", *cluster.ssh.options, host.name], capture_output=True, text=True)
    except FileNotFoundError:
        raise MachineError("there is no ssh here; install openssh-client") from None
    if done.returncode:
        raise JobError(f"ssh refuses cluster.ssh.options: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.name.rpartition("@")[2]
