"""Runs whose checkpoints are in S3: a real S3 server, s3fs, and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.command import DEADLINE_S, ENV, Output, losses, run_of, write_job
from helpers.forked_python import WITH_TWIN, Popen

from weft.checkpoint.format import entries
from weft.job.errors import Exit
from weft.job.files.store_path import StorePath

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


def train(folder: Path, s3: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "weft", "train", "job.yaml", *words]
    with Popen(command, env={**ENV, **s3, **WITH_TWIN}, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        _, output = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    return str(output)


def test_another_machine_with_an_empty_disk_resumes(tmp_path: Path, s3: dict[str, str]) -> None:
    """bench/store_nodes.py has several nodes without a shared folder."""
    first, other = tmp_path / "a", tmp_path / "b"
    write(first, 4)
    train(
        first,
        s3,
        "--nproc",
        "1",
        "checkpoint.every=1",
        "checkpoint.keep=2",
        "checkpoint.background=false",
        "--no-resilient",
    )
    assert not (first / "runs/job/checkpoints").exists()
    store = StorePath("s3://weft/runs/job")
    assert [(entry.step, entry.kind) for entry in entries(store / "checkpoints")] == [(3, "good"), (4, "good")]
    (store / "checkpoints" / "step-00000005" / "__0_0-ab.distcp").write_bytes(b"an interrupted upload")
    write(other, 6)
    output = train(other, s3, "--nproc", "2", "--no-resilient")
    assert "step-00000005 is damaged and was skipped: half-written" in output
    assert "resumed from step 4, s3://weft/runs/job/checkpoints/step-00000004 (written as 1 rank)" in output
    assert sorted(losses(run_of(other, "job"))) == [1, 2, 3, 4, 5, 6]  # with those of the other machine
    assert [entry.step for entry in entries(store / "checkpoints")][-1] == 6


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
