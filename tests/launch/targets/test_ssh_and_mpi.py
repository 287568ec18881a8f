"""Runs over real sshd on two addresses of this machine, by ssh and by mpirun, with a hostfile."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import parity
from helpers.command import Output, Started, losses, run_of, step_of, strays, until, weft, write_job
from helpers.forked_python import TEMPLATE_ENV
from helpers.real_clusters import SshHosts

from weft.extensions.diagnose.diagnose import diagnose
from weft.job.errors import JobError
from weft.job.files.run_folder import RunDir
from weft.launch.rank_pool import RankPool
from weft.launch.targets import ssh
from weft.launch.targets.driver import code_of_run, record_end
from weft.launch.targets.hostfile import Host, read_hosts
from weft.launch.targets.ssh_client import run_code
from weft.watch.journal import Journal, read_jsonl

STEPS = 3
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
InProcess = Callable[..., Output]


@pytest.fixture
def folder(tmp_path: Path, ssh_hosts: SshHosts) -> Path:
    """A folder with a job and a hostfile of two hosts with two slots each."""
    sections: dict[str, Any] = {**parity.BASE, "name": "run", "parallel": {"dp_shard": -1, "zero": 3}}
    sections["train"] = {**sections["train"], "steps": STEPS, "eval_every": 0}
    sections["cluster"] = {"device": "cpu", "hostfile": "hosts", "ssh": {"options": ssh_hosts.options}}
    write_job(tmp_path, **sections)
    (tmp_path / "hosts").write_text("127.0.1.1 slots=2\n127.0.1.2 slots=2  # the second\n")
    return tmp_path


def check_losses(folder: Path, name: str, pool: RankPool) -> None:
    job = parity.make_job(train={**parity.BASE["train"], "steps": STEPS, "eval_every": 0})
    local = parity.run(pool, job, "1", STEPS).result.trace.losses
    assert losses(run_of(folder, name)) == {i + 1: [pytest.approx(loss, rel=1e-4)] for i, loss in enumerate(local)}
    assert json.loads(run_of(folder, name).plan.read_text())["world"] == 4


def test_ssh_trains_the_same_run(folder: Path, in_process: InProcess, interpreter: str, pool: RankPool) -> None:
    python = f"cluster.python={interpreter}"
    accepted = in_process(folder, "launch", "job.yaml", python, "--on", "ssh", "--dry-run")
    assert "127.0.1.2 can be reached and has weft: 2 ranks" in accepted.err, accepted.err
    done = weft(folder, "launch", "job.yaml", python, "--on", "ssh")
    assert done.code == 0, done.err
    assert f"done: step {STEPS}" in done.err
    check_losses(folder, "run", pool)


def test_killed_client_leaves_no_process(folder: Path, interpreter: str) -> None:
    words = [f"cluster.python={interpreter}", "train.steps=100000"]
    client = Started(folder, "launch", "job.yaml", *words, "--on", "ssh")
    client.wait_for(lambda: step_of(run_of(folder, "run")) >= 1)
    client.process.kill()
    client.process.wait()
    until(lambda: not strays([str(folder)]))


def test_host_that_cannot_start_ends_the_run(folder: Path, interpreter: str) -> None:
    """The other host waits for it, and is stopped."""
    hosts = ["cluster.hosts=[127.0.1.1 slots=2, 127.0.1.9 slots=2]", "cluster.hostfile=null"]
    done = weft(folder, "launch", "job.yaml", *hosts, f"cluster.python={interpreter}", "--on", "ssh")
    assert (done.code, "the run needs all 2 hosts to start" in done.err) == (4, True), done.err
    assert not strays([str(folder)])
    done = weft(folder, "launch", "job.yaml", "cluster.python=/nowhere/python", "--on", "ssh")
    assert (done.code, "there is no /nowhere/python on" in done.last) == (4, True), done.err


def test_a_host_without_an_answer(folder: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = folder / "python"
    slow.write_text("#!/bin/sh\nexec sleep 5\n")
    slow.chmod(0o755)
    monkeypatch.setattr(ssh, "ANSWER_S", 1.0)
    done = in_process(folder, "launch", "job.yaml", f"cluster.python={slow}", "--on", "ssh", "--dry-run")
    assert (done.code, "127.0.1.1: no answer to `cd " in done.err) == (4, True), done.err


def test_mpi_trains_the_same_run(
    folder: Path, in_process: InProcess, interpreter: str, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AS_ROOT.items():
        monkeypatch.setenv(name, value)
    # both hosts are this machine, where the files of Open MPI's shared memory would have the same names
    options = "cluster.mpi.options=[--oversubscribe, --mca, btl, 'tcp,self', --mca, mpi_yield_when_idle, 1]"
    path = f"cluster.environment={{PYTHONPATH: '{TEMPLATE_ENV['PYTHONPATH']}'}}"
    launched = in_process(folder, "launch", "job.yaml", "name=mpi", options, path, "--on", "mpi")
    assert launched.code == 0, launched.err
    check_losses(folder, "mpi", pool)


def test_interrupted_mpi_run_is_saved(folder: Path, in_process: InProcess, interpreter: str) -> None:
    """mpirun itself would kill its ranks, and return 1."""
    options = "cluster.mpi.options=[--oversubscribe, --mca, mpi_yield_when_idle, 1]"
    local = ["cluster.hostfile=null", "cluster.ssh.options=[]", "cluster.devices_per_node=1", "parallel=auto"]
    words = [*local, options, f"cluster.python={interpreter}", "train.steps=100000"]
    client = Started(folder, "launch", "job.yaml", *words, "--on", "mpi", **AS_ROOT)
    client.wait_for(lambda: step_of(run_of(folder, "run")) >= 1)
    client.process.send_signal(signal.SIGINT)
    ended = client.end()
    assert ended.code == 130, ended.err
    assert "stopped and saved" in ended.err
    assert [row["state"] for row in json.loads(in_process(folder, "runs", "--json").out)["runs"]] == ["stopped"]


def test_exit_codes_of_mpirun(tmp_path: Path) -> None:
    assert code_of_run(137, [], starter=True) == 1, "a rank was killed"
    assert code_of_run(138, [], starter=True) == 75, "a rank that had no handler yet got SIGUSR1"
    assert code_of_run(75, [signal.SIGTERM], starter=True) == 75
    assert code_of_run(1, [signal.SIGINT] * 3, starter=True) == 130
    assert code_of_run(0, [signal.SIGINT], starter=True) == 0
    assert (code_of_run(-15, [], starter=False), code_of_run(-9, [], starter=False)) == (75, 1)
    run = RunDir(tmp_path)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "output.log").write_text("process rank 3 with PID 0 on node a exited on signal 9 (Killed).")
    with Journal(run) as journal:
        journal.event("stop", step=1)
        journal.event("start", step=1)
    for _ in range(2):
        record_end(tmp_path / "launch", 1)
    (last,) = [e for e in read_jsonl(run.events) if e["event"] == "failed"]
    assert (last["code"], last["why"]) == (1, "rank 3 was killed by a signal (Killed)")
    assert [finding.cause for finding in diagnose(run)[0]] == ["killed"]


def test_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "\ufeff# all\na slots=8\nme@b.c slots = 4 max-slots=8\n\na slots=2 # twice\n[fe80::1%eth0]\nme@::1\r\n"
    )
    assert read_hosts(str(file), ["d"], 3) == [
        Host("d", 3), Host("a", 10), Host("me@b.c", 4), Host("fe80::1%eth0", 3), Host("me@::1", 3),
    ]  # fmt: skip
    for text, sentence in (
        ("-oProxyCommand=x", "is not a host"), ("a; b", "is not a host"), ("a:22 slots=2", "a:22 has a port"),
        ("a slots=0", "slots=0 is not a number of ranks"), ("a slots=x", "slots=x is not a number"),
        ("a gpus=8", "gpus=8 is unknown"), ("a slots=1 slots=2", "slots=2 is unknown or repeated"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(JobError, match=sentence):
            read_hosts(str(file), [])
    with pytest.raises(JobError, match="there are no hosts"):
        read_hosts(None, [])
    with pytest.raises(JobError, match="has more than 4 MiB"):
        read_hosts("/dev/zero", [])


def test_exit_code_of_several_nodes() -> None:
    assert run_code([0, 0]) == 0
    assert run_code([0, 255]) == 0, "a node was lost, and the run finished"
    assert run_code([75, 75]) == 75
    assert run_code([255, 255]) == 4


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["cluster.nodes=3", "--print"], 2, "there are 2 hosts"),
        (["cluster.devices_per_node=4", "cluster.nodes=2", "--print"], 2, "has slots=2, fewer than"),
        (["cluster.hostfile=none", "--print"], 2, "cluster.hostfile=none cannot be read"),
        (["cluster.partition=x", "--print"], 2, "cluster.partition is not used by the target ssh"),
        (["cluster.hosts=127.0.1.1", "--print"], 2, "cluster.hosts='127.0.1.1'"),
        (["cluster.ssh.options=[-Z]", "--print"], 2, "ssh refuses cluster.ssh.options: unknown option -- Z"),
        (["cluster.hosts=[127.0.1.9 slots=4]", "cluster.hostfile=null", "--dry-run"], 4, "127.0.1.9"),
        (["cluster.workdir=/proc/nowhere", "--dry-run"], 4, "/proc/nowhere"),
    ],
)
def test_refusals_of_ssh(folder: Path, in_process: InProcess, words: list[str], code: int, text: str) -> None:
    refused = in_process(folder, "launch", "job.yaml", *words, "--on", "ssh")
    assert (refused.code, text in refused.last) == (code, True), refused.err


def test_mpi_that_starts_no_rank(folder: Path, in_process: InProcess) -> None:
    words = ["cluster.mpi.options=[--no-such-option]", "cluster.hostfile=null", "cluster.ssh.options=[]"]
    ended = in_process(folder, "launch", "job.yaml", *words, "--on", "mpi")
    assert (ended.code, "mpirun started no rank" in ended.last) == (4, True), ended.err


def test_mpi_that_is_not_there(folder: Path, in_process: InProcess) -> None:
    refused = in_process(folder, "launch", "job.yaml", "cluster.nodes=1..2", "--on", "mpi")
    assert (refused.code, "the ranks of mpirun are fixed" in refused.last) == (2, True)
    refused = in_process(folder, "launch", "job.yaml", "cluster.mpi.command=mpirun-x", "--on", "mpi")
    assert (refused.code, "there is no mpirun-x here" in refused.last) == (4, True)
