"""Seconds from `weft train` to its first step: with an empty compile cache, with a warm one under another run's name,
and from the kill of a rank, at a random moment, to the next step, once the run has a snapshot. With --overhead, also
the step times of that many steps with a supervisor and snapshots and without them (`--no-resilient`), by turns.

    python bench/start_up.py --shape 1b --rounds 1 --kills 10 --overhead 150       # on a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from gpu import end_run, weft_job
from shapes import SHAPES

from weft.checkpoint.memory_snapshots import Snapshots
from weft.supervisor.memory_folder import PREFIX, candidates

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0
MOMENT_S = 0.6
"""Longest time between a snapshot and a kill, about two steps of the 1B shape."""
LONG_STEP = 1.2
"""Times the median from which a step is listed."""


class Run:
    """A `weft train` that is watched through its metrics."""

    def __init__(self, folder: Path, job: dict[str, Any], name: str, changes: list[str]):
        self.path, self.log = folder / name, folder / f"{name}.txt"
        (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
        command = [sys.executable, "-m", "weft", "train", "job.yaml", f"name={name}", f"runs_dir={folder}", *changes]
        self.began = time.time()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=folder)

    def step_times(self) -> list[float]:
        """Seconds of each step after the tenth."""
        lines = (self.path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return [json.loads(line)["step_time_s"] for line in lines[10:]]

    def newest_snapshot(self) -> int:
        """The newest step in memory; runs that were killed before left none, since each start removes them."""
        folders = [at for base in candidates() for at in base.glob(f"{PREFIX}*")]
        return max((step for at in folders for step in Snapshots(at, 0, world=1).held()), default=-1)

    def wait_for_snapshot(self, after: int, at_most_s: float) -> tuple[int, float]:
        """Wait for a snapshot of a later step. Returns the newest, and the seconds."""
        began = time.time()
        while (newest := self.newest_snapshot()) <= after and time.time() - began < at_most_s:
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text(encoding="utf-8")[-2000:])
            time.sleep(0.05)
        return newest, time.time() - began

    def snapshot_memory(self) -> str:
        """What the run prints about the host memory of its snapshots."""
        lines = (self.path / "logs" / "rank-0.log").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if "snapshots" in line or "host memory" in line), "no line about snapshots")

    def last_recovery(self) -> tuple[float, dict[str, Any]]:
        """When the last fault was seen, and the event of its recovery."""
        events = [json.loads(line) for line in (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        fault, recovered = ([e for e in events if e["event"] == kind][-1] for kind in ("fault", "recovered"))
        return datetime.fromisoformat(fault["time"]).timestamp(), recovered

    def steps(self) -> int:
        try:
            return (self.path / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def wait_for(self, steps: int) -> float:
        """Seconds until so many steps are recorded."""
        began = time.time()
        while self.steps() < steps:
            if self.process.poll() is not None or time.time() - began > LIMIT_S:
                raise SystemExit(self.log.read_text(encoding="utf-8")[-2000:])
            time.sleep(0.02)
        return time.time() - began

    def kill_a_rank(self) -> bool:
        """Kill a supervised rank, if there is one."""
        ranks = [p for p in psutil.Process(self.process.pid).children(recursive=True) if p.name() == "weft-rank-0"]
        for rank in ranks[:1]:
            rank.send_signal(signal.SIGKILL)
        return bool(ranks)

    def end(self) -> None:
        end_run(self.process)


def kill_ranks(run: Run, kills: int, settle_s: float) -> None:
    """Kill the rank repeatedly, the first time after its first snapshot."""
    snapshot, waited = run.wait_for_snapshot(-1, LIMIT_S)
    print(f"first snapshot, of step {snapshot}, {waited:.1f} s after step 10: {run.snapshot_memory()}", flush=True)
    seconds, lost = [], []
    for _ in range(kills):
        snapshot, _ = run.wait_for_snapshot(run.steps(), settle_s)
        time.sleep(random.uniform(0, MOMENT_S))
        began = time.time()
        if not run.kill_a_rank():
            raise SystemExit("the run has no rank 0")
        lines = run.steps()
        run.wait_for(lines + 1)
        seconds.append(time.time() - began)
        run.wait_for(lines + 10)
        fault, recovered = run.last_recovery()
        lost.append(recovered["steps_lost"])
        print(
            f"kill after step {lines}: seen after {fault - began:.1f} s, training again after "
            f"{recovered['seconds']:.1f} s more, {recovered['steps_lost']} steps lost, next committed step after "
            f"{seconds[-1]:.1f} s", flush=True,
        )  # fmt: skip
    print(
        f"{kills} kills: median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s; steps lost {lost}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--settle", type=float, default=30.0, help="most seconds to wait for a newer snapshot")
    parser.add_argument("--overhead", type=int, default=0, metavar="STEPS")
    parser.add_argument("changes", nargs="*", help="key=value for the job")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-start-") as made:
        folder = Path(made)
        job = weft_job(SHAPES[asked.shape], asked.precision, made)
        for number in range(asked.rounds + 1):
            run = Run(folder, job, f"run-{number}", asked.changes)
            print(f"{'warm' if number else 'cold'}: first step after {run.wait_for(1):.1f} s", flush=True)
            run.wait_for(10)
            if asked.kills and number == asked.rounds:
                kill_ranks(run, asked.kills, asked.settle)
            run.end()
        for number in range(4 if asked.overhead else 0):
            flags = ["--no-resilient"] if number % 2 else []
            run = Run(folder, job, f"overhead-{number}", [*asked.changes, *flags])
            run.wait_for(asked.overhead + 10)
            times, snapshot = run.step_times(), run.newest_snapshot()
            middle = statistics.median(times)
            how = "without a supervisor" if flags else f"supervised, newest snapshot of step {snapshot}"
            part = max(1, len(times) // 5)  # snapshots begin when their memory is allocated
            fifths = ", ".join(f"{statistics.mean(times[i : i + part]) * 1e3:.2f}" for i in range(0, 5 * part, part))
            long = {i: round(t / middle, 2) for i, t in enumerate(times, 11) if t > LONG_STEP * middle}
            print(
                f"{how}: median {middle * 1e3:.2f} ms, mean {statistics.mean(times) * 1e3:.2f}, "
                f"of each fifth {fifths}; longest of {len(times)} {max(times) / middle:.3f} ×; "
                f"steps over {LONG_STEP} ×: {long}", flush=True,
            )  # fmt: skip
            run.end()


if __name__ == "__main__":
    main()
