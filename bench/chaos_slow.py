"""A rank with half a core: when it is detected, and how much of the lost throughput is regained.

    python bench/chaos_slow.py [--trials 3] [--share 0.5]

Two CPU ranks train; after 40 steps one of them is put under a CPU quota (a control group if root can make one, else
by alternating SIGSTOP and SIGCONT) and stays there. Three throughputs of one run, tokens over seconds:

- before: both ranks have a core;
- during: one is slow, and the work is still divided evenly;
- after: sequences have moved, over the run's last steps.

The slow rank works at s = during / before of its speed, so two ranks whose work is divided in proportion to their speed
could reach best = before × (1 + s) / 2. What is regained is (after - during) / (best - during): 0 if moving work did
nothing, 1 if the slow rank's missing half is all that is missing. The aim is 0.8. Before itself cannot be reached: half
of a core is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
AT, STEPS, LAST = 40, 160, 30
JOB = {
    "name": "slow", "model": {"family": "llama", "dim": 128, "layers": 3, "heads": 4, "ffn": 384},
    "data": {"source": "pydoc", "seq_len": 128}, "optim": {"lr": 1e-3}, "cluster": {"device": "cpu"},
    "train": {"steps": STEPS, "global_batch": 48, "microbatch": 4, "eval_every": 0},
    "parallel": {"dp_replicate": 2, "dp_shard": 1}, "checkpoint": {"every": 0},
}  # fmt: skip


@contextlib.contextmanager
def held_back(pid: int, share: float) -> Iterator[str]:
    """Give a process this share of one core. Yields by which means."""
    for group, means in ((Path("/sys/fs/cgroup"), "cpu.max"), (Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us")):
        folder = group / f"weft-slow-{pid}"
        if not os.path.ismount(group) or not (group / "cgroup.procs").exists():  # the other version of control groups
            continue
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                quota = f"{int(100_000 * share)}"
                (folder / means).write_text(f"{quota} 100000" if means == "cpu.max" else quota)
                (folder / "cgroup.procs").write_text(str(pid))
                yield "quota"
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(pid))
                return
            finally:
                with contextlib.suppress(OSError):
                    folder.rmdir()
    over = threading.Event()

    def slices() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                for number, seconds in ((signal.SIGSTOP, 1 - share), (signal.SIGCONT, share)):
                    os.kill(pid, number)
                    time.sleep(0.02 * seconds)

    thread = threading.Thread(target=slices)
    thread.start()
    try:
        yield "stop and go"
    finally:
        over.set()
        thread.join()


def lines(path: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return []


def process_of(launcher: int, rank: int) -> int:
    for child in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if child.name() == f"weft-rank-{rank}":
                return child.pid
    raise SystemExit(f"no process is named weft-rank-{rank}")


def trial(share: float) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        job, run = Path(folder) / "job.yaml", Path(folder) / "slow"
        job.write_text(json.dumps({**JOB, "runs_dir": folder}))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "weft", "train", str(job)]
        train = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(lines(run / "metrics.jsonl")) < AT and train.poll() is None:
            time.sleep(0.02)
        with held_back(process_of(train.pid, 1), share) as means:
            struck = len(lines(run / "metrics.jsonl"))
            train.wait()
        output = [e for e in lines(run / "events.jsonl") if e.get("fault") == "slow_rank"]
        seconds = [r["step_time_s"] for r in lines(run / "metrics.jsonl")]
    named = next((e for e in output if e["event"] == "fault" and e["step"] > struck), None)
    moved = next((e for e in output if e["event"] == "recovered" and e["step"] > struck), None)
    first = moved["step"] if moved else STEPS - LAST
    tokens = JOB["train"]["global_batch"] * JOB["data"]["seq_len"]  # type: ignore[index]
    parts = (seconds[10 : struck - 1], seconds[struck + 1 : first - 1], seconds[-LAST:])
    before, during, after = (tokens / statistics.mean(part) for part in parts)
    best = before * (1 + during / before) / 2
    return {
        "means": means,
        "before": before, "during": during, "after": after, "best": best,
        "regained": (after - during) / (best - during),
        "named_after_steps": named["step"] - struck if named else None,
        "named_rank": named["rank"] if named else None,
        "moved_after_steps": moved["step"] - struck if moved else None,
        "shares": [e["shares"] for e in output if e["event"] == "recovered"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="of a core, that the slow rank gets")
    args = parser.parse_args()
    for _ in range(args.trials):
        print(json.dumps(trial(args.share)), flush=True)


if __name__ == "__main__":
    main()
