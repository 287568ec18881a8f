"""An elastic run on virtual hosts: 2 → 4 → 3 → 1 → 4 nodes, compared with the same run on one rank.

    python bench/elastic.py [--json]          # root, Linux, iproute2; about 2 minutes on 2 cores

Nodes are network namespaces. A phase ends when its nodes have committed STEPS steps together; nodes leave by kill -9
of all their processes and come back as new processes. It reports whether every sample was read exactly once and how
far the losses are from those of a run of the same steps on one rank.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from weft.extensions.chaos.virtual_hosts import VirtualHosts
from weft.job.files.run_folder import RunDir
from weft.watch.journal import read_jsonl

PHASES = ({0, 1}, {0, 1, 2, 3}, {0, 1, 2}, {1}, {0, 1, 2, 3})
STEPS = 40
BATCH = 12
PHASE_TIMEOUT_S = 180.0
JOB: dict[str, Any] = {
    "model": {"family": "gpt2", "dim": 32, "layers": 2, "heads": 2},
    "data": {"source": "pydoc", "tokenizer": "bytes", "seq_len": 64, "record_ids": True},
    "train": {"global_batch": BATCH, "steps": 1_000_000, "eval_every": 0},
    "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
    "parallel": {"dp_shard": -1, "zero": 3}, "precision": "fp32",
    "checkpoint": {"every": 0}, "resilience": {"rebalance": False, "roll_back": False, "spares": 0, "node_lost_s": 4},
}  # fmt: skip


def write_job(folder: Path, name: str, **changes: Any) -> None:
    job = {**JOB, "name": name, **changes}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")


class ElasticRun:
    """The nodes of the run, and what its files say."""

    def __init__(self, hosts: VirtualHosts, folder: Path) -> None:
        self.hosts, self.folder, self.run = hosts, folder, RunDir(folder / "runs" / "elastic")
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        env = {**os.environ, "NODE_RANK": str(node), "NNODES": "4", "MASTER_ADDR": self.hosts.address(0)}
        command = [sys.executable, "-m", "weft", "train", "elastic.yaml", "--nproc", "1"]
        with (self.folder / f"node-{node}.txt").open("a", encoding="utf-8") as out:
            self.nodes[node] = self.hosts.start(node, command, env, cwd=self.folder, stdout=out, stderr=out)

    def reach(self, wanted: set[int], after: int) -> dict[str, Any]:
        """Start and kill nodes, and wait for STEPS steps of an attempt of exactly these."""
        began = time.monotonic()
        for node in set(self.nodes) - wanted:
            self.hosts.kill(node)
            self.nodes.pop(node).wait()
        for node in wanted - set(self.nodes):
            self.start(node)
        while True:
            starts = [e for e in read_jsonl(self.run.events) if e["event"] == "start" and e["attempt"] > after]
            last = max((r["step"] for r in read_jsonl(self.run.metrics)[-5:]), default=0)
            if starts and starts[-1]["world"] == len(wanted) and last >= starts[-1]["step"] + STEPS:
                first = int(starts[-1]["step"])
                return {
                    "nodes": len(wanted), "attempt": starts[-1]["attempt"], "from_step": first + 1,
                    "layout": starts[-1]["layout"], "seconds": round(time.monotonic() - began, 1),
                }  # fmt: skip
            if time.monotonic() - began > PHASE_TIMEOUT_S or any(p.poll() is not None for p in self.nodes.values()):
                outputs = [p.read_text(encoding="utf-8")[-1500:] for p in sorted(self.folder.glob("node-*.txt"))]
                raise SystemExit(f"nodes {sorted(wanted)} did not train together:\n" + "\n---\n".join(outputs))
            time.sleep(0.1)

    def stop(self) -> list[int]:
        next(iter(self.nodes.values())).send_signal(signal.SIGTERM)
        return [process.wait(PHASE_TIMEOUT_S) for process in self.nodes.values()]


def samples(run: RunDir) -> dict[int, list[int]]:
    """Samples by step, over all ranks."""
    found: dict[int, list[int]] = {}
    for path in sorted(run.samples.glob("rank-*.jsonl")):
        for line in read_jsonl(path):
            found.setdefault(line["step"], []).extend(line["ids"])
    return found


def compare(run: RunDir, reference: RunDir, steps: int) -> dict[str, Any]:
    ours, theirs = samples(run), samples(reference)
    wrong = [s for s in range(1, steps + 1) if sorted(ours.get(s, [])) != sorted(theirs[s])]
    loss = {r["step"]: r["loss"] for r in read_jsonl(run.metrics)}
    expected = {r["step"]: r["loss"] for r in read_jsonl(reference.metrics)}
    lines = [r["step"] for r in read_jsonl(run.metrics)]
    off = [abs(loss[s] - expected[s]) / expected[s] for s in range(1, steps + 1)]
    return {
        "steps": steps, "samples": sum(map(len, ours.values())), "steps_with_other_samples": len(wrong),
        "steps_repeated": len(lines) - len(set(lines)), "largest_loss_difference": max(off),
        "last_loss": loss[steps], "last_loss_of_one_rank": expected[steps],
    }  # fmt: skip


def measure(folder: Path) -> dict[str, Any]:
    write_job(folder, "elastic", cluster={"device": "cpu", "nodes": "2..4"})
    with VirtualHosts(4) as hosts:
        elastic = ElasticRun(hosts, folder)
        phases: list[Any] = []
        for wanted in PHASES:
            phases.append(elastic.reach(wanted, phases[-1]["attempt"] if phases else 0))
            print(f"{phases[-1]}", file=sys.stderr, flush=True)
        codes = elastic.stop()
    steps = max(r["step"] for r in read_jsonl(elastic.run.metrics))
    train = {**JOB["train"], "steps": steps}
    write_job(folder, "one", cluster={"device": "cpu"}, parallel="auto", train=train)
    subprocess.run([sys.executable, "-m", "weft", "train", "one.yaml", "--nproc", "1"], cwd=folder, check=True,
                   capture_output=True)  # fmt: skip
    return {"phases": phases, "exit_codes": codes, **compare(elastic.run, RunDir(folder / "runs" / "one"), steps)}


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="weft-elastic-"))
    try:
        found = measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if "--json" in sys.argv:
        print(json.dumps(found, indent=1))
    else:
        print("| nodes | layout | from step | seconds until 40 steps are committed |\n|---|---|---|---|")
        for phase in found["phases"]:
            print(f"| {phase['nodes']} | {phase['layout']} | {phase['from_step']} | {phase['seconds']} |")
        print(
            f"\n{found['steps']} steps, {found['samples']} samples; {found['steps_with_other_samples']} steps with "
            f"other samples than on one rank, {found['steps_repeated']} taken again after a loss; largest relative "
            f"difference of a loss {found['largest_loss_difference']:.1e}"
        )
    return 0 if not found["steps_with_other_samples"] and found["largest_loss_difference"] < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
