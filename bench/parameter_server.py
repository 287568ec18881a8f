"""A parameter server with one worker four times slower: time to a validation loss, asynchronous and synchronous.

python bench/parameter_server.py            two workers, of which one may run a quarter of the time
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path

import psutil

from weft.job.files.run_folder import RunDir
from weft.watch.journal import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
SLICE_S = 0.02
"""The slow worker runs for this long and is stopped for three times as long."""

JOB = (
    "data.seq_len=64", "train.global_batch=16", "train.eval_every=10", "train.eval_batches=2", "optim.lr=3e-3",
    "optim.warmup=0.1", "optim.schedule=constant", "checkpoint.every=0", "parallel=auto",
)  # fmt: skip


def joined(run: RunDir, workers: int) -> datetime | None:
    """When the last worker joined."""
    times = [datetime.fromisoformat(e["time"]) for e in read_jsonl(run.events) if e["event"] == "worker_joined"]
    return times[workers - 1] if len(times) >= workers else None


def slow_down(launcher: int, run: RunDir, workers: int, slowness: int, over: threading.Event) -> None:
    """After all workers have joined, let the last one run only a part of the time."""
    words = ("worker", str(workers))  # the chief is number 0
    while joined(run, workers) is None and not over.is_set():
        time.sleep(SLICE_S)
    while not over.is_set():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            found = [p for p in psutil.Process(launcher).children() if all(w in p.cmdline() for w in words)]
            for process in found:
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(SLICE_S * (slowness - 1))
                os.kill(process.pid, signal.SIGCONT)
        time.sleep(SLICE_S)


def run(folder: Path, order: str, steps: int, workers: int, slowness: int) -> RunDir:
    """Train once; the last worker is slow."""
    command = [
        sys.executable, "-m", "weft", "train", "tiny", f"name={order}", f"train.sync=server:{order}",
        f"train.steps={steps}", *JOB, "--nproc", str(workers),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    over, at = threading.Event(), RunDir(folder / "runs" / order)
    thread = threading.Thread(target=slow_down, args=(process.pid, at, workers, slowness, over))
    thread.start()
    code = process.wait()
    over.set()
    thread.join()
    if code:
        raise SystemExit(f"{' '.join(command)} ended with code {code}")
    return at


def reached(run: RunDir, loss: float, workers: int) -> tuple[float, int] | None:
    """Seconds since all workers joined, and the step, at which an evaluation first reached a loss."""
    start = joined(run, workers)
    assert start is not None
    for event in read_jsonl(run.events):
        if event["event"] == "eval" and event["step"] and event["val_loss"] <= loss:
            return (datetime.fromisoformat(event["time"]) - start).total_seconds(), event["step"]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slowness", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {o: run(Path(folder), o, asked.steps, asked.workers, asked.slowness) for o in ("sync", "async")}
        evals = {o: [e["val_loss"] for e in read_jsonl(r.events) if e["event"] == "eval"] for o, r in runs.items()}
        target = max(min(losses) for losses in evals.values())  # both runs have reached it
        print(f"{asked.workers} workers, one {asked.slowness}x slower; validation loss {target:.3f}")
        times = {}
        for order, at in runs.items():
            found = reached(at, target, asked.workers)
            assert found is not None
            times[order] = found[0]
            steps = [r for r in read_jsonl(at.metrics)]
            stale = sum(r["staleness"] for r in steps) / len(steps)
            print(f"{order:6} {found[0]:6.1f} s, step {found[1]}, gradients {stale:.2f} updates old on average")
        print(f"asynchronous {times['sync'] / times['async']:.2f}x sooner")


if __name__ == "__main__":
    main()
