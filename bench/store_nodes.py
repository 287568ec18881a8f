"""Two nodes without a shared folder, whose checkpoints are in a real S3 server: one is killed and comes back.

    python bench/store_nodes.py       # needs weft[s3] and moto[server]; about a minute on 2 cores

Each node has a run folder of its own on loopback. Then a third folder, as of another machine with an empty disk,
resumes the run on one rank. Prints what each phase took.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import StorePath
from weft.watch.journal import read_jsonl

LIMIT_S = 180.0
TO = "s3://weft/runs"
JOB: dict[str, Any] = {
    "name": "run", "model": {"family": "gpt2", "dim": 16, "layers": 1, "heads": 2}, "data": {"seq_len": 8},
    "train": {"global_batch": 4, "steps": 1_000_000, "eval_every": 0}, "parallel": {"dp_shard": -1, "zero": 3},
    "optim": {"schedule": "constant", "warmup": 0}, "cluster": {"device": "cpu"}, "resilience": {"spares": 0},
    "checkpoint": {"every": 0, "to": TO},
}  # fmt: skip


def write_job(folder: Path, steps: int) -> None:
    folder.mkdir()
    job = {**JOB, "train": {**JOB["train"], "steps": steps}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")


def start(folder: Path, node: int | None) -> subprocess.Popen[bytes]:
    place = {} if node is None else {"NODE_RANK": str(node), "NNODES": "2", "MASTER_ADDR": "127.0.0.1"}
    with (folder / "output.txt").open("a", encoding="utf-8") as out:
        command = [sys.executable, "-m", "weft", "train", "job.yaml", "--nproc", "1"]
        return subprocess.Popen(command, env={**os.environ, **place}, cwd=folder, stdout=out, stderr=out)


def trains(folders: list[Path], world: int, after: int) -> int:
    """Wait for 20 steps of an attempt of so many ranks, after that one; rank 0 may be on any node."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for folder in folders:
            run = RunDir(folder / "runs" / "run")
            found = [e for e in read_jsonl(run.events) if e["event"] == "start" and e["attempt"] > after]
            last = max((r["step"] for r in read_jsonl(run.metrics)[-3:]), default=0)
            if found and found[-1]["world"] == world and last >= found[-1]["step"] + 20:
                return int(found[-1]["attempt"])
        time.sleep(0.1)
    raise SystemExit("\n---\n".join((f / "output.txt").read_text(encoding="utf-8")[-2000:] for f in folders))


def kill(process: subprocess.Popen[bytes]) -> None:
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.kill()
    process.wait()


def measure(folder: Path) -> None:
    folders = [folder / "a", folder / "b"]
    for each in folders:
        write_job(each, 1_000_000)
    began = time.monotonic()

    def show(text: str) -> None:
        nonlocal began
        print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)
        began = time.monotonic()

    nodes = [start(each, i) for i, each in enumerate(folders)]
    attempt = trains(folders, 2, 0)
    show("two nodes with folders of their own train together")
    kill(nodes[0])
    attempt = trains(folders[1:], 1, attempt)
    show("node 0 was killed, with rank 0; node 1 continues from its own memory")
    nodes[0] = start(folders[0], 0)
    trains(folders, 2, attempt)
    show("node 0 is back")
    nodes[1].send_signal(signal.SIGTERM)
    codes = [node.wait(LIMIT_S) for node in nodes]
    names = StorePath(f"{TO}/run/checkpoints").names()
    step = max(int(name.split("/")[0].removeprefix("step-")) for name in names if name.endswith("/manifest.json"))
    show(f"stopped and saved at step {step}; exit codes {codes}")
    other = folder / "c"
    write_job(other, step + 10)
    code = start(other, None).wait(LIMIT_S)
    steps = {r["step"] for r in read_jsonl(RunDir(other / "runs" / "run").metrics)}
    show(f"another folder resumed from the store; exit code {code}, metrics of {len(steps)} of {step + 10} steps")


def main() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }  # fmt: skip
    import s3fs

    s3fs.S3FileSystem().mkdir("weft")
    with tempfile.TemporaryDirectory(prefix="weft-store-") as folder:
        measure(Path(folder))
    server.stop()


if __name__ == "__main__":
    main()
