"""Seconds from `weft train` to its first step: with an empty compile cache, with a warm one under another run's name,
and from the kill of a rank to the next step. With --overhead, also the step times of that many steps with a supervisor
and snapshots and without them (`--no-resilient`), by turns. Run it on a GPU: python bench/start_up.py --shape 1b"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from gpu import end_run, weft_job
from shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0


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
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["step_time_s"] for line in lines[10:]]

    def last_recovery(self) -> tuple[int, float]:
        """Steps that the last recovery lost, and its seconds until training went on."""
        lines = (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
        last = [e for e in map(json.loads, lines) if e["event"] == "recovered"][-1]
        return last["steps_lost"], last["seconds"]

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--settle", type=float, default=30.0, help="seconds of training before each kill")
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
            for _ in range(asked.kills if number == asked.rounds else 0):
                time.sleep(asked.settle)  # a first snapshot of many gigabytes takes a while
                steps = run.steps()
                if run.kill_a_rank():
                    new_step = run.wait_for(steps + 1)
                    run.wait_for(steps + 10)
                    lost, training = run.last_recovery()
                    print(
                        f"kill after step {steps}: training again after {training:.1f} s, {lost} steps lost, next new "
                        f"step after {new_step:.1f} s", flush=True,
                    )  # fmt: skip
            run.end()
        for number in range(4 if asked.overhead else 0):
            flags = ["--no-resilient"] if number % 2 else []
            run = Run(folder, job, f"overhead-{number}", [*asked.changes, *flags])
            run.wait_for(asked.overhead + 10)
            times = run.step_times()
            middle = statistics.median(times)
            how = "without a supervisor" if flags else "supervised"
            print(
                f"{how}: median {middle * 1e3:.2f} ms, longest of {len(times)} {max(times) / middle:.3f} ×", flush=True
            )
            run.end()


if __name__ == "__main__":
    main()
