"""Processor time and wake-ups of every process and thread of a run that does not train.

    python bench/background_cpu.py [--steps 40] [--root .]

Two ranks that leave no core free, as in bench/overhead.py. Counts come from the kernel (/proc) and are rates, which
depend little on the load of the machine. `--root` names another checkout, to compare two versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from overhead import BATCH, MODEL, ROOT, SEQ, WARMUP_STEPS

NAMES = {"weft.supervisor.supervisor": "supervisor", "weft.training.supervised_rank": "rank", "-m weft": "manager"}


class Used(NamedTuple):
    """What a thread has used so far."""

    run_ms: float
    wakeups: int


def threads_of(parent: psutil.Process) -> dict[tuple[str, int, str, int], Used]:
    """By the kind of process, its pid, and the thread's name and number."""
    found = {}
    for process in [parent, *parent.children(recursive=True)]:
        try:
            line = " ".join(process.cmdline())
            kind = next((name for words, name in NAMES.items() if words in line), line[:40])
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                run = int((thread / "schedstat").read_text().split()[0]) / 1e6
                switches = (thread / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0]
                name = (thread / "comm").read_text().strip()
                found[kind, process.pid, name, int(thread.name)] = Used(run, int(switches))
        except (psutil.NoSuchProcess, OSError):
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "name": "beside", "model": MODEL, "data": {"source": "pydoc", "seq_len": SEQ}, "runs_dir": folder,
            "train": {"steps": args.steps, "global_batch": BATCH, "eval_every": 0}, "optim": {"lr": 1e-3},
            "parallel": {"dp_replicate": 2, "dp_shard": 1}, "checkpoint": {"every": 0},
        }  # fmt: skip
        path, metrics = Path(folder) / "job.yaml", Path(folder) / "beside" / "metrics.jsonl"
        path.write_text(json.dumps(job))
        run = psutil.Popen(
            [sys.executable, "-m", "weft", "train", str(path)], stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(args.root.resolve())}, cwd=args.root,
        )  # fmt: skip

        def after(step: int) -> dict[tuple[str, int, str, int], Used]:
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
                if run.poll() is not None:
                    raise SystemExit(f"weft train ended with code {run.returncode} before step {step}")
                time.sleep(0.05)
            return threads_of(run)

        before, began = after(WARMUP_STEPS), time.monotonic()
        then, seconds = after(args.steps - 2), time.monotonic() - began
        run.wait()
    rows = []
    for key, used in then.items():
        was = before.get(key, Used(0.0, 0))
        rows.append((*key[:3], (used.run_ms - was.run_ms) / seconds, (used.wakeups - was.wakeups) / seconds))
    trains = {pid: max(r[3] for r in rows if r[1] == pid) for pid in {r[1] for r in rows}}
    beside = [r for r in rows if not (r[3] == trains[r[1]] and r[3] > 50)]
    print(f"{'process':12s} {'pid':>7s} {'thread':18s} {'ms a second':>11s} {'wake-ups a second':>18s}")
    for kind, pid, name, ms, wakeups in sorted(beside, key=lambda r: (r[0], r[1], -r[3])):
        if ms >= 0.005 or wakeups >= 0.05:
            print(f"{kind:12s} {pid:7d} {name:18s} {ms:11.2f} {wakeups:18.1f}")
    print(f"{'all of them':39s} {sum(r[3] for r in beside):11.2f} {sum(r[4] for r in beside):18.1f}")


if __name__ == "__main__":
    main()
