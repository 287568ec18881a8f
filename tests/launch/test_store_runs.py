"""Runs whose checkpoints are in S3, on nodes that share no folder: a real S3 server, s3fs, and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.command import DEADLINE_S, ENV, Output, losses, run_of, step_of, until, write_job
from helpers.forked_python import Popen

from weft.checkpoint.format import entries
from weft.job.errors import Exit
from weft.job.store_path import StorePath
from weft.watch.journal import read_jsonl

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The variables that lead to an S3 server with the bucket "weft"."""
    from moto.server import ThreadedMotoServer

    made = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    found = {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    import s3fs

    s3fs.S3FileSystem(
        key=KEYS["AWS_ACCESS_KEY_ID"], secret=KEYS["AWS_SECRET_ACCESS_KEY"], endpoint_url=found["AWS_ENDPOINT_URL"]
    ).mkdir("weft")
    yield found
    made.stop()


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return server


def write(folder: Path, steps: int) -> None:
    folder.mkdir(exist_ok=True)
    write_job(
        folder, model={"family": "gpt2", "dim": 16, "layers": 1, "heads": 2}, data={"seq_len": 8},
        train={"global_batch": 4, "steps": steps, "eval_every": 0}, parallel={"dp_shard": -1, "zero": 3},
        cluster={"device": "cpu"}, checkpoint={"every": 0, "to": "s3://weft/runs"},
        resilience={"node_lost_s": 5, "spares": 0}, optim={"lr": 1e-3, "schedule": "constant", "warmup": 0},
    )  # fmt: skip


def start(folder: Path, node: int, s3: dict[str, str]) -> subprocess.Popen[bytes]:
    env = {**ENV, **s3, "NODE_RANK": str(node), "NNODES": "2", "MASTER_ADDR": "127.0.0.1"}
    with (folder / "output.txt").open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", "weft", "train", "job.yaml", "--nproc", "1"]
        return Popen(command, env=env, cwd=folder, stdout=file, stderr=file)


def test_nodes_without_a_shared_folder(tmp_path: Path, s3: dict[str, str]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write(folder, 1_000_000)
    runs = [run_of(folder, "job") for folder in folders]
    nodes = [start(folder, i, s3) for i, folder in enumerate(folders)]

    def output() -> str:
        return "\n".join((folder / "output.txt").read_text(encoding="utf-8")[-3000:] for folder in folders)

    def trains(world: int, run: int, after: int) -> int:
        """Wait for steps of an attempt on so many nodes, after that one. Node `run` has rank 0."""
        began: list[dict[str, Any]] = []

        def so() -> bool:
            assert nodes[1].poll() is None, output()
            began[:] = [e for e in read_jsonl(runs[run].events) if e["event"] == "start" and e["attempt"] > after]
            return bool(began) and began[-1]["world"] == world and step_of(runs[run]) > began[-1]["step"] + 3

        until(so)
        return int(began[-1]["attempt"])

    attempt = trains(2, run=0, after=0)
    assert not (folders[0] / "runs/job/checkpoints").exists()
    for process in [psutil.Process(nodes[0].pid), *psutil.Process(nodes[0].pid).children(recursive=True)]:
        process.kill()  # with rank 0 and the metrics
    nodes[0].wait(DEADLINE_S)
    attempt = trains(1, run=1, after=attempt)
    nodes[0] = start(folders[0], 0, s3)
    trains(2, run=1, after=attempt)
    nodes[1].send_signal(signal.SIGTERM)
    assert [node.wait(DEADLINE_S) for node in nodes] == [Exit.PREEMPTED] * 2, output()

    last = entries(StorePath("s3://weft/runs/job/checkpoints"))[-1]
    assert last.kind == "good"
    third = tmp_path / "c"  # another machine, with an empty disk and one rank
    write(third, last.step + 2)
    command = [sys.executable, "-m", "weft", "train", "job.yaml", "--nproc", "1"]
    with Popen(command, env={**ENV, **s3}, cwd=third, stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert f"resumed from step {last.step}, s3://weft/runs/job/checkpoints" in said
    found = losses(run_of(third, "job"))  # with those of the steps that other machines took
    assert {last.step - 1, last.step, last.step + 1, last.step + 2} <= set(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"to": "s3://absent/runs"}, "the bucket does not exist"),
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_CONFIG_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true"},
            "no credentials",
        ),
    ],
)
def test_store_that_refuses_ends_the_command_with_code_4(
    change: dict[str, str], words: str, tmp_path: Path, s3: dict[str, str], in_process: Callable[..., Output],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import fsspec

    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for name, value in change.items():
        if name != "to":
            monkeypatch.setenv(name, value)
    write(tmp_path, 2)
    to = change.get("to", "s3://weft/runs")
    output = in_process(tmp_path, "train", "job.yaml", f"checkpoint.to={to}", "name=refused", "--nproc", "1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert output.code == Exit.MACHINE
    assert output.last.startswith(f"weft: checkpoint.to={to}/refused cannot be written: ")
    assert words in output.last
    assert not (tmp_path / "runs/refused").exists()
