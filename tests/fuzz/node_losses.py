"""Runs that lose ranks, nodes and links at random moments: `python -m tests.fuzz.node_losses [COUNT] [SEED]`.

Their three hosts are network namespaces, so it must be root. After every few faults the run must train on; it may end
only where it is told to, with code 75 on every node. Steps that are computed again have the same loss, and every sample
is read once.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from weft.extensions.chaos.virtual_hosts import VirtualHosts
from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.watch.journal import read_jsonl

HOSTS, BATCH = 3, 12
PROGRESS_S = 180.0
"""How long a run may take to recover and train a few steps."""
JOB: dict[str, Any] = {
    "model": {"family": "gpt2", "dim": 16, "layers": 2, "heads": 2, "vocab": 48},
    "data": {"source": "synthetic", "seq_len": 8, "record_ids": True},
    "train": {"global_batch": BATCH, "steps": 1_000_000, "eval_every": 0},
    "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
    "resilience": {"node_lost_s": 3, "spares": 0},
    "cluster": {"device": "cpu"},
}
LAYOUTS = ({"dp_shard": -1, "zero": 3}, {"dp_shard": -1, "zero": 1}, {"dp_replicate": -1})


class Nodes:
    """A run with one rank on each host, and what was done to it."""

    def __init__(self, hosts: VirtualHosts, folder: Path, chance: random.Random):
        self.hosts, self.folder, self.chance = hosts, folder, chance
        self.run = RunDir(folder / "runs" / "job")
        job = {**JOB, "parallel": chance.choice(LAYOUTS), "checkpoint": {"every": chance.choice((0, 5, 13))}}
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.dead: set[int] = set()
        self.cut: set[int] = set()
        self.done: list[str] = []
        self.start(*range(HOSTS))

    def start(self, *nodes: int) -> None:
        for node in nodes:
            here = {"NODE_RANK": str(node), "NNODES": str(HOSTS), "MASTER_ADDR": self.hosts.address(0)}
            env = {**os.environ, **here, "WEFT_QUEUE": "/nonexistent", "PYTHONPATH": os.getcwd()}
            command = [sys.executable, "-m", "weft", "train", "job.yaml", "--nproc", "1"]
            with (self.folder / f"said-{node}.txt").open("a") as said:
                self.processes[node] = self.hosts.start(node, command, env, cwd=self.folder, stdout=said, stderr=said)
            self.dead.discard(node)

    @property
    def step(self) -> int:
        return max((r["step"] for r in read_jsonl(self.run.metrics) if isinstance(r.get("step"), int)), default=0)

    def alive(self) -> list[int]:
        return [node for node in range(HOSTS) if node not in self.dead | self.cut]

    def trains(self) -> bool:
        """Wait for four new steps; False if the run has ended or none come."""
        first, end = self.step, time.monotonic() + PROGRESS_S
        while time.monotonic() < end and any(p.poll() is None for p in self.processes.values()):
            if self.step > first + 3:
                return True
            time.sleep(0.3)
        return False

    def break_something(self) -> bool:
        """One fault, or the end of one; False if the run did not stop or continue as it should."""
        kinds = ["rank", "rank"] + ["kill", "cut"] * (len(self.alive()) > 1)
        kinds += ["start"] * (3 * bool(self.dead)) + ["join"] * (3 * bool(self.cut))
        kinds += ["stop"] * (not self.dead and not self.cut)
        kind, node = self.chance.choice(kinds), self.chance.choice(self.alive())
        self.done.append(f"{kind} {node} at step {self.step}")
        if kind == "rank":
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                ranks = [psutil.Process(pid) for pid in self.hosts.processes(node)]
                ranks = [p for p in ranks if "supervised_rank" in " ".join(p.cmdline())]
                self.chance.choice(ranks).send_signal(self.chance.choice((signal.SIGKILL, signal.SIGSEGV)))
        elif kind == "kill":
            self.hosts.kill(node)
            self.dead.add(node)
        elif kind == "cut":
            self.hosts.cut(node)
            self.cut.add(node)
        elif kind == "start":
            self.start(self.chance.choice(sorted(self.dead)))
        elif kind == "join":
            self.hosts.join(found := self.chance.choice(sorted(self.cut)))
            self.cut.discard(found)
        else:
            return self.stop(node)
        return True

    def stop(self, node: int) -> bool:
        """Stop the whole run by a signal to one node, once all nodes train, and start it again."""
        time.sleep(10)  # a node that was away has joined again
        if not self.trains():
            return False
        self.processes[node].send_signal(signal.SIGTERM)
        codes = [process.wait(PROGRESS_S) for process in self.processes.values()]
        self.start(*range(HOSTS))
        return codes == [Exit.PREEMPTED] * HOSTS and self.trains()

    def heal(self) -> None:
        for node in sorted(self.cut):
            self.hosts.join(node)
        self.cut.clear()
        self.start(*sorted(self.dead))

    def wrong(self) -> str:
        """What the files of the run show, or empty."""
        if failed := [e["why"] for e in read_jsonl(self.run.events) if e.get("event") == "failed"]:
            return f"failed: {failed}"
        losses: dict[int, list[float]] = {}
        for record in read_jsonl(self.run.metrics):
            losses.setdefault(record["step"], []).append(record["loss"])
        pairs = [(a, b) for values in losses.values() for a, b in pairwise(values)]
        if any(abs(a - b) > 1e-4 * abs(a) for a, b in pairs):
            return "a step that was computed again has another loss"
        ids: dict[int, list[int]] = {}
        for path in self.run.samples.glob("rank-*.jsonl"):
            for line in read_jsonl(path):
                ids.setdefault(line["step"], []).extend(line["ids"])
        last = max(losses, default=1)
        if any(sorted(ids.get(s, [])) != list(range((s - 1) * BATCH, s * BATCH)) for s in range(1, last)):
            return "samples of a step are missing or were read twice"
        return ""


def lose_some(folder: Path, chance: random.Random) -> str:
    """One run; returns what went wrong, or empty."""
    with VirtualHosts(HOSTS) as hosts:
        nodes = Nodes(hosts, folder, chance)
        good = nodes.trains()
        for _ in range(chance.randint(4, 9)):
            good = good and nodes.break_something()
            time.sleep(chance.choice((0.0, 0.3, 1.0, 2.0, 4.0)))
            good = good and (chance.random() < 0.5 or nodes.trains())
        if good:
            nodes.heal()
            good = nodes.trains()
        problem = nodes.wrong() if good else f"does not train: {[p.poll() for p in nodes.processes.values()]}"
        said = "".join(path.read_text()[-1500:] for path in sorted(folder.glob("said-*.txt")))
    return f"{problem} after {', '.join(nodes.done)}\n{said}" if problem else ""


def main(count: int = 20, seed: int = 0) -> int:
    failures = 0
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="weft-nodes-") as folder:
            problem = lose_some(Path(folder), random.Random(f"{seed} {number}"))
        failures += bool(problem)
        print(f"{number}: {problem or 'good'}", flush=True)
    print(f"{count} runs, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
