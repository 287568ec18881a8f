"""A real Ray cluster of two nodes in this machine: a run on two actors, one of which is killed.

    python bench/ray_cluster.py

Needs the extra weft[ray]. Prints the losses' agreement with a run without faults, and what the test costs; it is too
expensive for the test suite.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import yaml

from weft.extensions.ray.ray_driver import RayRun, bundle_of
from weft.job.files.run_folder import RunDir
from weft.watch.journal import read_jsonl

STEPS = 30
JOB = {
    "model": {"shape": "tiny"}, "data": {"source": "synthetic", "seq_len": 16, "record_ids": True},
    "train": {"steps": STEPS, "global_batch": 4, "eval_every": 0}, "resilience": {"rebalance": False, "spares": 0},
    "cluster": {"device": "cpu", "nodes": 2, "devices_per_node": 1}, "watch": {"every": 1},
}  # fmt: skip
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def train(folder: Path, name: str, kill_at: int | None) -> tuple[int, int, float]:
    """Train on two actors and kill the second at a step. Returns exit code, replaced actors and seconds."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**JOB, "name": name}), encoding="utf-8")
    command = [sys.executable, "-m", "weft", "train", str(path), "--nproc", "1"]
    run = RayRun(command, 2, bundle_of(1, 0), str(folder), str(folder / f"{name}.log"), LOOPBACK)
    started = time.monotonic()

    def kill() -> None:
        metrics = RunDir(folder / "runs" / name).metrics
        while not metrics.exists() or len(list(read_jsonl(metrics))) < (kill_at or 0):
            time.sleep(0.05)
        pids = [
            p.pid for p in psutil.process_iter(["cmdline"]) if "ray::NodeActor" in " ".join(p.info["cmdline"] or ())
        ]
        os.kill(max(pids), 9)

    if kill_at is not None:
        threading.Thread(target=kill, daemon=True).start()
    return run.train(), run.replaced, time.monotonic() - started


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # 15 by default: next to other programs, training would hardly run
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    from ray.cluster_utils import Cluster

    begun = time.monotonic()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20})
    cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    os.environ["RAY_ADDRESS"] = cluster.address
    up_s = time.monotonic() - begun
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        plain = train(folder, "plain", None)
        killed = train(folder, "killed", STEPS // 3)
        losses = [
            [record["loss"] for record in read_jsonl(RunDir(folder / "runs" / name).metrics)]
            for name in ("plain", "killed")
        ]
        if plain[0] or killed[0]:
            print((folder / "killed.log").read_text()[-3000:], file=sys.stderr)
    import ray

    ray.shutdown()
    cluster.shutdown()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    apart = max((abs(a - b) / a for a, b in zip(*losses, strict=False)), default=float("nan"))
    print(json.dumps({
        "cluster_up_s": round(up_s, 1), "plain": {"exit_code": plain[0], "seconds": round(plain[2], 1)},
        "actor_killed": {"exit_code": killed[0], "replaced_actors": killed[1], "seconds": round(killed[2], 1)},
        "steps": [len(each) for each in losses], "largest_relative_loss_difference": apart,
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
