"""A run on several hosts that loses ranks, nodes and links, gets them back, and reads every sample once."""

from __future__ import annotations

import json
import math
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.command import DEADLINE_S, ENV, ids_by_step, losses, run_of, start_node, step_of, until, write_job
from helpers.forked_python import Popen

from weft.extensions.chaos.virtual_hosts import VirtualHosts
from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.supervisor.nodes.attempt_claims import AttemptClaims
from weft.supervisor.process_manager import pointer_path
from weft.supervisor.status_board import StatusBoard
from weft.watch.journal import read_jsonl

BATCH = 12


class Cluster:
    """VirtualHosts on which the same command is started, one supervisor each."""

    def __init__(self, hosts: VirtualHosts, folder: Path, run: RunDir) -> None:
        self.hosts, self.folder, self.run = hosts, folder, run
        self.claims = AttemptClaims(run.path / "attempts")
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        env = {**ENV, "NODE_RANK": str(node), "NNODES": str(self.hosts.count), "MASTER_ADDR": self.hosts.address(0)}
        with (self.folder / f"said-{node}.txt").open("a", encoding="utf-8") as file:
            command = [sys.executable, "-m", "weft", "train", "job.yaml", "--nproc", "1"]
            self.nodes[node] = self.hosts.start(node, command, env, cwd=self.folder, stdout=file, stderr=file)

    def result(self) -> str:
        return "\n".join(p.read_text(encoding="utf-8") for p in sorted(self.folder.glob("said-*.txt")))

    def trains_in(self, nodes: set[int], after: int) -> int:
        """Wait until these nodes commit steps together, in an attempt after that one. Returns its number."""

        def so() -> bool:
            assert all(p.poll() is None for n, p in self.nodes.items() if n in nodes), self.result()
            newest = self.claims.newest()
            decision = self.claims.read(newest)
            if newest <= after or decision is None or decision.nodes != nodes:
                return False
            starts = [e for e in read_jsonl(self.run.events) if e["event"] == "start" and e["attempt"] == newest]
            return bool(starts) and step_of(self.run) > starts[-1]["step"] + 2

        try:
            until(so)
        except AssertionError:
            pytest.fail(f"{self.claims.newest()} {step_of(self.run)}\n{self.result()[-6000:]}")
        return self.claims.newest()

    def safe_step(self, node: int) -> int:
        """The step of this attempt that all nodes have copied, as a node knows it."""
        folder = json.loads(pointer_path(self.run, str(node)).read_text(encoding="utf-8"))["folder"]
        board = StatusBoard(Path(folder) / "board")
        try:
            return board["safe"]
        finally:
            board.close()

    def listening(self, node: int) -> list[str]:
        """Every address at which something on a host accepts connections."""
        command = ["ip", "netns", "exec", self.hosts.names[node], "ss", "-Hltn"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [line.split()[3] for line in lines]

    def ranks(self, node: int) -> list[psutil.Process]:
        """The processes of a host that could be ranks."""
        found = [psutil.Process(pid) for pid in self.hosts.processes(node)]
        return [p for p in found if "weft.training.supervised_rank" in " ".join(p.cmdline())]


def start_cluster(hosts: VirtualHosts, folder: Path, **sections: Any) -> Cluster:
    """A run with one rank on every host."""
    write_job(
        folder, model={"family": "gpt2", "dim": 16, "layers": 1, "heads": 2, "vocab": 48},
        data={"source": "helpers.own_models:SlowCounting", "seq_len": 8, "record_ids": True},
        train={"global_batch": BATCH, "steps": 1_000_000, "eval_every": 0}, parallel={"dp_shard": -1, "zero": 3},
        cluster={"device": "cpu"}, checkpoint={"every": 0}, resilience={"node_lost_s": 5, "spares": 0},
        optim={"lr": 1e-3, "schedule": "constant", "warmup": 0}, **sections,
    )  # fmt: skip
    made = Cluster(hosts, folder, run_of(folder, "job"))
    for node in range(hosts.count):
        made.start(node)
    return made


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(subprocess, "Popen", Popen)
    with VirtualHosts(3) as hosts:
        yield start_cluster(hosts, tmp_path)


STRANGER = """
import os, socket, sys
for garbage in (b"", b"\\0" * 64, b"weft-1\\r\\n" + os.urandom(64), b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(100_000)):
    for at in sys.argv[1:]:
        host, port = at.rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), timeout=5) as sock:
                sock.sendall(garbage)
        except OSError:
            pass
"""


def test_run_survives_lost_ranks_nodes_and_links(cluster: Cluster) -> None:
    attempt = cluster.trains_in({0, 1, 2}, after=0)

    # strangers at every socket of the run, from another host: supervisors, the store, Gloo
    listening = [at for node in range(3) for at in cluster.listening(node)]
    assert len(listening) > 3
    assert all(at.startswith("10.73.") for at in listening)  # the cluster's own network, and nothing else
    assert cluster.hosts.start(0, [sys.executable, "-c", STRANGER, *listening]).wait(DEADLINE_S) == 0
    step = step_of(cluster.run)
    until(lambda: step_of(cluster.run) > step + 2)

    next(p for p in cluster.ranks(1) if _is_rank(p, 1, cluster.run)).kill()
    attempt = cluster.trains_in({0, 1, 2}, after=attempt)
    until(lambda: all(cluster.safe_step(node) for node in range(3)))  # neighbours hold each other's steps again

    cluster.hosts.kill(0)  # with rank 0, and the one who leads
    attempt = cluster.trains_in({1, 2}, after=attempt)
    lost = [e for e in read_jsonl(cluster.run.events) if e["event"] == "fault" and e["fault"] == "node_lost"]
    assert any(event["why"].startswith("node 0 was silent for") for event in lost)

    cluster.start(0)
    attempt = cluster.trains_in({0, 1, 2}, after=attempt)

    cluster.hosts.cut(2)
    attempt = cluster.trains_in({0, 1}, after=attempt)
    until(lambda: "the others continued without it" in cluster.result())
    until(lambda: all(cluster.safe_step(node) for node in range(2)))
    decision = cluster.claims.read(attempt)
    assert decision is not None
    other = 1 - decision.leader
    cluster.hosts.join(2)
    until(lambda: "node 2 joins: the ranks save and restart with it" in cluster.result())
    cluster.hosts.kill(other)  # while the ranks save: the leader's have been asked to stop
    attempt = cluster.trains_in({decision.leader, 2}, after=attempt)
    joined = cluster.result().count(f"node {other} joins")
    cluster.start(other)
    until(lambda: cluster.result().count(f"node {other} joins") > joined)
    cluster.hosts.kill(other)  # before it enters the attempt, which counts it in
    attempt = cluster.trains_in({decision.leader, 2}, after=attempt)
    cluster.start(other)
    attempt = cluster.trains_in({0, 1, 2}, after=attempt)

    cluster.nodes[1].send_signal(signal.SIGTERM)
    assert [cluster.nodes[n].wait(DEADLINE_S) for n in range(3)] == [Exit.PREEMPTED] * 3, cluster.result()
    _check_metrics(cluster.run)
    recovered = [e["how"] for e in read_jsonl(cluster.run.events) if e["event"] == "recovered"]
    assert {"shrink", "grow"} <= set(recovered)


@pytest.mark.parametrize("code", [0, 2])
def test_node_that_never_joins_ends_with_the_others(tmp_path: Path, code: int) -> None:
    """A node that cannot reach the others learns from the run's folder that they are done."""
    with _start_incomplete(tmp_path, node=0, count=2) as node:
        until((run_of(tmp_path, "job").path / "nodes" / "0.json").exists)
        (run_of(tmp_path, "job").path / "nodes" / "ended").write_text(json.dumps([code, "token", 1]))
        said = node.communicate(timeout=DEADLINE_S)[1]
    assert node.returncode == code, said
    assert "the other nodes have ended the run" in said


def test_node_that_is_stopped_while_nodes_gather_ends_the_others(tmp_path: Path) -> None:
    with _start_incomplete(tmp_path, node=0, count=3) as first, _start_incomplete(tmp_path, node=1, count=3) as second:
        folder = run_of(tmp_path, "job").path / "nodes"
        until(lambda: (folder / "0.json").exists() and (folder / "1.json").exists())
        second.send_signal(signal.SIGINT)
        try:
            said = [node.communicate(timeout=DEADLINE_S)[1] for node in (second, first)]
        finally:
            first.kill()
    assert [first.returncode, second.returncode] == [Exit.INTERRUPTED] * 2, said
    assert "weft: node 1 ended with exit code 130 while the nodes gathered" in said[1]
    assert "stopped while it waited for the other nodes" in said[0]
    assert not list(folder.glob("?.json"))


def _start_incomplete(folder: Path, node: int, count: int) -> subprocess.Popen[str]:
    """Start a node of a run of which not all nodes are started."""
    write_job(
        folder, model={"shape": "tiny"}, data={"seq_len": 8}, train={"global_batch": 6, "steps": 2},
        resilience={"gather_s": 1e6},
    )  # fmt: skip
    return start_node(folder, node, count)


@pytest.mark.parametrize("overrides", [[], ["optim.lr=0.1", "train.global_batch=6"]], ids=["same job", "another"])
def test_all_nodes_train_the_job_of_the_first(tmp_path: Path, overrides: list[str]) -> None:
    """A run is continued with other settings, and its second node reads the run's folder before the first has written
    them there; or is itself started with others."""
    sections: dict[str, Any] = {
        "model": {"shape": "tiny"}, "data": {"source": "synthetic", "seq_len": 8}, "parallel": {"dp_replicate": 2},
        "resilience": {"check_every": 1, "spares": 0},
    }  # fmt: skip
    run = run_of(tmp_path, "job")
    for steps, lr in ((2, 1e-3), (5, 5e-3)):
        train = {"global_batch": 4, "steps": steps, "eval_every": 0}
        write_job(tmp_path, **sections, train=train, optim={"lr": lr, "schedule": "constant", "warmup": 0})
        nodes = [start_node(tmp_path, 1, 2, *overrides)]
        until(lambda: _ranks_wait(run) or nodes[0].poll() is not None)  # noqa: B023
        nodes.append(start_node(tmp_path, 0, 2))
        said = [node.communicate(timeout=DEADLINE_S)[1] for node in nodes]
        assert [node.returncode for node in nodes] == [Exit.DONE] * 2, said
    assert {line["lr"] for line in read_jsonl(run.metrics) if line["step"] > 2} == {5e-3}
    assert [event for event in read_jsonl(run.events) if event["event"] == "fault"] == []
    assert {line["tokens"] for line in read_jsonl(run.metrics) if line["step"] == 5} == {5 * 4 * 8}


def test_first_node_says_why_a_rank_of_another_failed(tmp_path: Path) -> None:
    write_job(
        tmp_path, model={"module": "helpers.own_models:RaisesOnRankOne"}, data={"seq_len": 8},
        train={"global_batch": 4, "steps": 9, "eval_every": 0}, resilience={"spares": 0},
    )  # fmt: skip
    nodes = [start_node(tmp_path, node, 2) for node in range(2)]
    said = [node.communicate(timeout=DEADLINE_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], "\n".join(said)
    for output, prefix in zip(said, ("node 1: ", ""), strict=True):
        assert f"{prefix}rank 1 (dp_" in output
        assert "ValueError: the third step is too much for me" in output


def test_lost_node_says_why_its_rank_failed(tmp_path: Path) -> None:
    """The others go on without it meanwhile, and remove the failure records of the run's folder."""
    write_job(
        tmp_path, model={"module": "helpers.own_models:RaisesWhenAsked"}, data={"seq_len": 8},
        train={"global_batch": 4, "steps": 1_000_000, "eval_every": 0}, resilience={"spares": 0},
    )  # fmt: skip
    run = run_of(tmp_path, "job")
    first, second = (start_node(tmp_path, node, 2, "resilience.node_lost_s=5") for node in range(2))
    until(lambda: step_of(run) > 2)
    for process in psutil.Process(second.pid).children():
        if "node_supervisor" in " ".join(process.cmdline()):
            process.suspend()
    (tmp_path / "raise").touch()
    until(lambda: "recovered" in run.events.read_text(encoding="utf-8"))
    for process in psutil.Process(second.pid).children():
        process.resume()
    said = second.communicate(timeout=DEADLINE_S)[1]
    assert second.returncode == 1 and "ValueError: there is a file" in said, said
    first.terminate()
    said = first.communicate(timeout=DEADLINE_S)[1]
    assert first.returncode == Exit.PREEMPTED and "without node 1" in said, said


@pytest.mark.parametrize(("words", "differ"), [
    (1500, "rank 0 has 44 samples to train on and 5 held out, rank 1 33 samples to train on and 4 held out"),
    (2000, "ranks 0 and 1 have other contents in as many samples"),
], ids=["shorter", "other"])  # fmt: skip
def test_nodes_with_other_data_are_refused(tmp_path: Path, words: int, differ: str) -> None:
    nodes = []
    for node, text in enumerate((" ".join(["warp"] * 2000), " ".join(["weft"] * words))):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "text.txt").write_text(text, encoding="utf-8")
        write_job(
            folder, model={"shape": "tiny"}, data={"source": "text.txt", "format": "text", "seq_len": 200}, name="run",
            train={"global_batch": 4, "steps": 2, "eval_every": 0}, checkpoint={"to": str(tmp_path / "store")},
        )  # fmt: skip
        nodes.append(start_node(folder, node, 2))
    said = [node.communicate(timeout=DEADLINE_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [Exit.JOB] * 2, said
    assert f"data.source text.txt is not the same on all ranks: {differ}; copy one to all nodes" in said[0]


def _ranks_wait(run: RunDir) -> bool:
    """Whether the process of node 1's rank has read its job."""
    if not (pointer := pointer_path(run, "1")).exists():
        return False
    board = StatusBoard(Path(json.loads(pointer.read_text(encoding="utf-8"))["folder"]) / "board")
    try:
        return board.record(0).phase == "spare"
    finally:
        board.close()


RECORD = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.bind(("eth0", 0))
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.write(packets.recv(1 << 16))
"""
NORM_WEIGHTS = struct.pack("<8f", *[1.0] * 8)
"""The shard of a layer norm's initial weights, which the other rank gathers."""


@pytest.mark.parametrize("encrypt", [False, True])
def test_encrypted_nodes(encrypt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the messages of supervisors nor those of Gloo can be read, and a lost rank is replaced as without TLS."""
    monkeypatch.setattr(subprocess, "Popen", Popen)
    with VirtualHosts(2) as hosts:
        recorded = tmp_path / "packets"
        hosts.start(0, [sys.executable, "-c", RECORD, str(recorded)])
        until(recorded.exists)
        cluster = start_cluster(hosts, tmp_path, comm={"encrypt": encrypt})
        attempt = cluster.trains_in({0, 1}, after=0)
        if encrypt:
            next(p for p in cluster.ranks(1) if _is_rank(p, 1, cluster.run)).kill()
            cluster.trains_in({0, 1}, after=attempt)
        cluster.nodes[1].send_signal(signal.SIGTERM)
        assert [cluster.nodes[n].wait(DEADLINE_S) for n in range(2)] == [Exit.PREEMPTED] * 2, cluster.result()
        assert "Traceback" not in cluster.result()
        seen = recorded.read_bytes()
    assert len(seen) > 100_000
    assert [text in seen for text in (b'"purpose"', b'"copied"', NORM_WEIGHTS)] == [not encrypt] * 3
    _check_metrics(cluster.run)


def _check_metrics(run: RunDir) -> None:
    """Every step was committed, repeated steps have the same loss, and every sample was read once."""
    output = losses(run)
    last = max(output)
    assert sorted(output) == list(range(1, last + 1))
    again = {step: values for step, values in output.items() if len(values) > 1}
    assert all(math.isclose(a, b, rel_tol=1e-3) for values in again.values() for a, b in pairwise(values))
    assert output[last][-1] < output[1][0]
    starts = [e["step"] for e in read_jsonl(run.events) if e["event"] == "start"]
    assert starts[0] == 0
    assert all(starts[1:])  # nothing was begun anew: what a lost node had was in its neighbour's memory
    read = ids_by_step(run)
    ids = [i for step in range(1, last + 1) for i in read[step]]
    assert all(len(read[step]) == BATCH for step in range(1, last + 1))
    assert len(set(ids)) == len(ids)


def _is_rank(process: psutil.Process, rank: int, run: RunDir) -> bool:
    """Whether a process is that rank now, by the files it has open."""
    return any(Path(f.path).name == f"rank-{rank}.log" for f in process.open_files())
