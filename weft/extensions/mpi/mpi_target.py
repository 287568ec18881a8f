"""The target `mpi`: one process a rank, started by mpirun on the hosts of a hostfile."""

from __future__ import annotations

import shlex
import shutil
import signal
from typing import Any

from weft.job.cluster import Cluster
from weft.job.errors import JobError, MachineError
from weft.launch.targets.hostfile import hosts_of, with_hosts
from weft.launch.targets.process_target import ProcessTarget, run_process
from weft.launch.targets.target import LaunchRequest, Submission

HOSTFILE = "hostfile"


class MpiTarget(ProcessTarget):
    """Ranks that mpirun starts; without hosts, on this machine. There is no supervisor: a lost rank ends the run."""

    name = "mpi"
    summary = "mpirun, with a hostfile"
    forwarded = signal.SIGUSR1  # mpirun forwards it; at SIGTERM and SIGINT it kills the ranks before they have saved
    fields = frozenset({"hostfile", "hosts", "interface", "mpi", "python", "setup", "ssh", "workdir"})

    def check_settings(self, cluster: Cluster) -> None:
        super().check_settings(cluster)
        if cluster.max_nodes is not None:
            raise JobError(
                f"cluster.nodes={cluster.nodes}..{cluster.max_nodes}: the ranks of mpirun are fixed; give one number, "
                "or use the target ssh or slurm"
            )

    def complete(self, section: dict[str, Any]) -> dict[str, Any]:
        return with_hosts(section) if section.get("hostfile") or section.get("hosts") else section

    def world(self, cluster: Cluster) -> int | None:
        return sum(host.slots for host in hosts_of(cluster)) if cluster.hostfile or cluster.hosts else None

    def build(self, request: LaunchRequest) -> Submission:
        script = request.node_script(*request.train_command())
        files, words = self._mpirun(request)
        return Submission(((*words, "-np", str(request.plan.world), "bash", "-c", script, "weft"),), files)

    def _mpirun(self, request: LaunchRequest) -> tuple[dict[str, str], list[str]]:
        cluster, files = request.cluster, dict[str, str]()
        words = [cluster.mpi.command]
        if cluster.hostfile or cluster.hosts:
            files[HOSTFILE] = "".join(f"{host.line()}\n" for host in hosts_of(cluster))
            words += ["--hostfile", str(request.launch_folder / HOSTFILE)]
        if cluster.ssh.options:
            words += ["--mca", "plm_rsh_agent", shlex.join(["ssh", *cluster.ssh.options])]
        return files, [*words, *cluster.mpi.options]

    def check(self, request: LaunchRequest, submission: Submission) -> list[str]:
        command = request.cluster.mpi.command
        if shutil.which(command) is None:
            raise MachineError(f"there is no {command} here; install Open MPI, or set cluster.mpi.command")
        return [run_process([command, "--version"]).splitlines()[0]]

    def run_on_nodes(self, request: LaunchRequest, command: list[str]) -> str:
        files, words = self._mpirun(request)
        for name, text in files.items():
            (request.launch_folder / name).write_text(text, encoding="utf-8")
        each = ["-np", str(request.nodes), "--map-by", "ppr:1:node"]
        return run_process([*words, *each, "bash", "-c", request.node_script(*command), "weft"])

    def submit(self, request: LaunchRequest, submission: Submission) -> str:
        self.check(request, submission)
        return super().submit(request, submission)
