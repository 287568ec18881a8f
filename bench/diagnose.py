"""How often `weft diagnose` names a planted cause, and what it says of healthy runs → diagnose.md.

    python bench/diagnose.py [--times 10] [--only slow_rank,healthy] [--write]

Planted on two CPU ranks of this machine: a rank that is stopped half of the time (slow_rank), a dataset that sleeps
(data_starved), a link between two network namespaces that `tc` limits to 20, 50 or 100 Mbit/s (slow_link; needs
root), recompute of everything (unneeded_recompute), microbatches of one sequence (small_microbatch), a pipeline of two
stages with one or two microbatches (large_bubble). Healthy runs are of several layouts. A finding `neighbour` is right
on a machine that is busy with something else, so it is counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60
STARVED_TRAIN = {"steps": 24, "global_batch": 16, "eval_every": 0}
LINK_TRAIN = {"steps": 26, "global_batch": 4, "eval_every": 0}
LINK_MBIT = (20, 50, 100)
SLOW_DATASET = '''
"""A dataset whose samples take a while."""

import time

import numpy as np


class Slow:
    train_len, val_len = 4096, 64

    def train(self, index):
        time.sleep(0.15)  # longer than the computation of a sample, also on a busy machine
        x = (np.arange(65) * (index + 1)) % 251
        return {"inputs": x[:-1], "targets": x[1:]}

    val = train


def make(data):
    return Slow()
'''
LAYOUTS: dict[str, dict[str, int]] = {
    "ddp": {"dp_replicate": 2, "dp_shard": 1}, "zero3": {"dp_shard": 2, "zero": 3}, "tp": {"tp": 2},
    "zero2": {"dp_shard": 2, "zero": 2}, "cp": {"cp": 2},
}  # fmt: skip
PIPELINE: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}


def job(folder: Path, name: str, **more: Any) -> Path:
    """The file of a small Llama on two CPU ranks."""
    described = {
        "name": name, "runs_dir": str(folder / "runs"),
        "model": {"family": "llama", "dim": 128, "layers": 4, "heads": 4, "ffn": 352},
        "data": {"source": "pydoc", "seq_len": 64, "tokenizer": "bytes"},
        "train": {"steps": STEPS, "global_batch": 16, "eval_every": 0}, "checkpoint": {"every": 0},
        "cluster": {"device": "cpu", "devices_per_node": 2}, "parallel": LAYOUTS["ddp"], **more,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(described), encoding="utf-8")
    return path


def train(folder: Path, path: Path, during: Callable[[subprocess.Popen[bytes]], Any] | None = None) -> Path:
    """Train a job; `during` runs beside it. Returns the run's folder."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weft", "train", str(path)]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if during is not None:
        threading.Thread(target=during, args=(process,), daemon=True).start()
    process.wait(timeout=600)
    return folder / "runs" / path.stem


def stop_half_of_the_time(process: subprocess.Popen[bytes]) -> None:
    """Stop rank 1 for 40 ms of every 80, as a busy core would."""
    victim: psutil.Process | None = None
    while process.poll() is None:
        try:
            if victim is None or not victim.is_running():
                ranks = psutil.Process(process.pid).children(recursive=True)
                victim = next((p for p in ranks if "weft-rank-1" in (p.name(), *p.cmdline())), None)
                time.sleep(0.05)
                continue
            victim.send_signal(signal.SIGSTOP)
            time.sleep(0.04)
            victim.send_signal(signal.SIGCONT)
            time.sleep(0.04)
        except psutil.Error:
            victim = None


def slow_rank(folder: Path, number: int) -> Path:
    resilience = {"rebalance": number % 2 == 1}
    return train(folder, job(folder, f"slow-rank-{number}", resilience=resilience), stop_half_of_the_time)


def data_starved(folder: Path, number: int) -> Path:
    (folder / "slow_dataset.py").write_text(SLOW_DATASET, encoding="utf-8")
    data = {"source": "slow_dataset:make", "seq_len": 64}
    layout = list(LAYOUTS.values())[number % 2]
    return train(folder, job(folder, f"starved-{number}", train=STARVED_TRAIN, data=data, parallel=layout))


def unneeded_recompute(folder: Path, number: int) -> Path:
    layout = list(LAYOUTS.values())[number % 3]
    return train(folder, job(folder, f"recompute-{number}", memory={"recompute": "full"}, parallel=layout))


def small_microbatch(folder: Path, number: int) -> Path:
    layout = list(LAYOUTS.values())[number % 4]
    step = {"steps": STEPS, "global_batch": 16, "microbatch": 1, "eval_every": 0}
    return train(folder, job(folder, f"microbatch-{number}", train=step, parallel=layout))


def large_bubble(folder: Path, number: int) -> Path:
    step = {"steps": STEPS, "global_batch": 16, "microbatch": (16, 8)[number % 2], "eval_every": 0}
    schedule = ("1f1b", "gpipe")[number // 2 % 2]
    layout = {**PIPELINE, "schedule": schedule}
    return train(folder, job(folder, f"bubble-{number}", train=step, parallel=layout))


def healthy(folder: Path, number: int) -> Path:
    layouts = {**LAYOUTS, "pipeline": PIPELINE}
    name = list(layouts)[number % len(layouts)]
    more: dict[str, Any] = {"parallel": layouts[name]}
    if name == "pipeline":
        more["train"] = {"steps": STEPS, "global_batch": 64, "microbatch": 4, "eval_every": 0}
    return train(folder, job(folder, f"healthy-{name}-{number}", **more))


@contextlib.contextmanager
def two_hosts(number: int) -> Iterator[Any]:
    """Two network namespaces with a slow link."""
    sys.path.insert(0, str(ROOT))
    from weft.extensions.chaos.virtual_hosts import VirtualHosts

    with VirtualHosts(2, mbit=LINK_MBIT[number % len(LINK_MBIT)]) as hosts:
        yield hosts


def slow_link(folder: Path, number: int) -> Path:
    """Two hosts with one rank each, started by torchrun."""
    cluster = {"device": "cpu", "nodes": 2, "devices_per_node": 1}
    path = job(folder, f"link-{number}", cluster=cluster, train=LINK_TRAIN)
    with two_hosts(number) as hosts:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started = []
        for host in range(2):
            line = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--node-rank", str(host), "--master-addr", hosts.address(0), "--master-port", "29741",
                "-m", "weft", "train", str(path),
            ]  # fmt: skip
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(hosts.start(host, line, env=env, cwd=folder, **quiet))
        for process in started:
            process.wait(timeout=600)
    return folder / "runs" / path.stem


CASES: dict[str, Callable[[Path, int], Path]] = {
    "slow_rank": slow_rank, "data_starved": data_starved, "slow_link": slow_link,
    "unneeded_recompute": unneeded_recompute, "small_microbatch": small_microbatch, "large_bubble": large_bubble,
    "healthy": healthy,
}  # fmt: skip


def findings(run: Path) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "weft", "diagnose", str(run), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    return list(json.loads(result.stdout)["findings"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--write", action="store_true", help="write diagnose.md")
    asked = parser.parse_args()
    lines = ["| planted | runs | named | other causes | neighbour |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="weft-diagnose-") as name:
        for case in asked.only.split(","):
            named, false, busy = 0, Counter[str](), 0
            for number in range(asked.times):
                found = findings(CASES[case](Path(name), number))
                causes = {f["cause"] for f in found}
                named += case in causes and (case != "slow_rank" or any(f["rank"] == 1 for f in found))
                busy += "neighbour" in causes
                false.update(causes - {case, "neighbour"})
                for f in found:
                    print(f"  {case} {number}: {f['cause']} ({f['costs_percent']} %): {f['evidence']}", flush=True)
            others = ", ".join(f"{cause} {n}" for cause, n in false.items()) or "none"
            shown = "–" if case == "healthy" else f"{named} of {asked.times}"
            lines.append(f"| {case} | {asked.times} | {shown} | {others} | {busy} |")
            print(lines[-1], flush=True)
    print("\n".join(lines))
    if asked.write:
        about = "# What `weft diagnose` finds\n\n`python bench/diagnose.py`, on a machine of two cores.\n\n"
        (Path(__file__).parent / "diagnose.md").write_text(about + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
