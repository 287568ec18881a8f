"""A real Slurm and real sshd on this machine, started for a test session."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 300.0

SLURM_CONF = """\
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=3
MinJobAge=600
SlurmdTimeout=300
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.1.[1-4] Port=[{first}-{last}] CPUs=2 Sockets=1 CoresPerSocket=2 \
ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n[1-4] Default=YES State=UP OverSubscribe=FORCE:4
"""


def free_ports(count: int) -> int:
    """The first of some consecutive free ports."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # workers do not look at the same ports
    for first in range(21_000 + 1000 * (worker % 10) + os.getpid() % 500, 32_000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                with closing(socket.socket()) as probe:
                    probe.bind(("0.0.0.0", port))
            return first
    raise AssertionError("no free ports")


def until(what: object, message: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


def stop_by_pid_file(path: Path) -> None:
    """End a daemon, and wait until it is gone."""
    with suppress(OSError, ValueError):
        pid = int(path.read_text().strip())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class SlurmCluster:
    """slurmctld and four slurmd, n1 to n4, with their own munged."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-slurm-"))
        self.folder.chmod(0o755)
        host, first = socket.gethostname().split(".")[0], free_ports(5)
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(
            SLURM_CONF.format(host=host, folder=self.folder, port=first + 4, first=first, last=first + 3)
        )
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", *(f"spool-n{n}" for n in range(1, 5))):
            (self.folder / name).mkdir()
        self.env = {"SLURM_CONF": str(self.conf)}

    def __enter__(self) -> Self:
        munge = {"key": "munge.key", "seed": "munge.seed", "pid": "munged.pid", "log": "munged.log"}
        files = [f"--{kind}-file={self.folder / name}" for kind, name in munge.items()]
        self.command("munged", "--force", f"--socket={self.folder / 'munge.socket'}", *files)
        self.command("slurmctld", "-c")
        for node in range(1, 5):
            self.command("slurmd", "-N", f"n{node}")
        until(
            lambda: self.command("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == "4", "Slurm is not up"
        )
        return self

    def command(self, *words: str, check: bool = True) -> str:
        """The output of a command of Slurm."""
        env = {**os.environ, **self.env, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=START_TIMEOUT_S)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.command("scancel", "--user=root", check=False)
        for name in ("slurmctld.pid", *(f"slurmd-n{n}.pid" for n in range(1, 5)), "munged.pid"):
            stop_by_pid_file(self.folder / name)
        shutil.rmtree(self.folder, ignore_errors=True)


class SshHosts:
    """sshd on 127.0.1.1 and 127.0.1.2; `options` are those of ssh."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-sshd-"))
        self.options = ["-F", str(self.folder / "ssh_config")]

    def __enter__(self) -> Self:
        folder, port = self.folder, free_ports(1)
        for name in ("host", "client"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.1.1\nListenAddress 127.0.1.2\nHostKey {folder}/host\n"
            f"PidFile {folder}/sshd.pid\nAuthorizedKeysFile {folder}/client.pub\nStrictModes no\nUsePAM no\n"
        )
        (folder / "ssh_config").write_text(
            f"Host *\n  Port {port}\n  IdentityFile {folder}/client\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        subprocess.run([str(sshd), "-f", folder / "sshd_config"], check=True)
        until((folder / "sshd.pid").exists, "sshd is not up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_by_pid_file(self.folder / "sshd.pid")
        shutil.rmtree(self.folder, ignore_errors=True)
