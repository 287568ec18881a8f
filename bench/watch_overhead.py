"""Overhead of watching at default settings: one run in which it is switched off and on every ten steps → overhead.md.

    python bench/watch_overhead.py [--steps 800] [--batch 8] [--json]

Two CPU ranks. Off are the timing of messages, the records of steps, the progress line and the energy account. A block
of ten steps with them is compared with the mean of the blocks before and after it, which cancels slow changes of the
machine; the median of these differences is the overhead of a step's time and of the ranks' processor time. The share of
the processor time inside the functions that are switched depends least on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overhead import MODEL, ROOT, SEQ

BLOCK, WARMUP_BLOCKS = 10, 4
SWITCH = '''
"""Switches watching off in every second block of steps, and writes the times of steps."""

import os
import time
from pathlib import Path

from weft.comm.timeline import CommTimeline
from weft.training.figures.comm_metrics import CommMetrics
from weft.training.metrics import StepMetrics
from weft.extensions.energy.run_energy import RunEnergy
from weft.watch.journal import Journal
from weft.watch.progress import Progress

BLOCK, OUT = 10, Path(os.environ["WATCH_OVERHEAD"])
STATE = {"on": True, "inside": 0.0, "depth": 0}
next_step, post = CommMetrics.next_step, StepMetrics.post


def only_if_on(method, otherwise):
    return counted(lambda self, *args: method(self, *args) if STATE["on"] else otherwise)


def counted(method):
    """The method, whose processor time is summed."""

    def call(*args):
        began = time.thread_time()
        STATE["depth"] += 1
        try:
            return method(*args)
        finally:
            STATE["depth"] -= 1
            if not STATE["depth"]:
                STATE["inside"] += time.thread_time() - began

    return call


def switched_next_step(self, step):
    self.__dict__.setdefault("own_every", self.every)
    STATE["on"] = step // BLOCK % 2 == 0
    self.every = self.own_every if STATE["on"] else 0
    return next_step(self, step)


def timed_post(self, grads, norm, lr):
    with (OUT / f"rank-{self.mesh.rank}").open("a") as file:
        file.write(f"{self.state.step} {time.perf_counter()} {time.process_time()} {STATE['inside']}\\n")
    return post(self, grads, norm, lr)


CommMetrics.next_step, StepMetrics.post = counted(switched_next_step), timed_post
CommMetrics.figures = counted(CommMetrics.figures)
for name in ("count", "started", "follow"):
    setattr(CommTimeline, name, counted(getattr(CommTimeline, name)))
Journal.metrics = only_if_on(Journal.metrics, None)
Progress.update = only_if_on(Progress.update, None)
RunEnergy.metrics = only_if_on(RunEnergy.metrics, {})
'''


def run(folder: Path, steps: int, batch: int) -> list[list[tuple[float, float, float]]]:
    """Wall-clock time, processor time and its part inside watching (seconds) at the ends of steps, by rank."""
    (folder / "switched_watching.py").write_text(SWITCH, encoding="utf-8")
    job = {
        "name": "watched", "model": MODEL, "data": {"source": "pydoc", "seq_len": SEQ}, "runs_dir": str(folder),
        "train": {"steps": steps, "global_batch": batch, "eval_every": 0}, "checkpoint": {"every": 0},
        "parallel": {"dp_replicate": 2, "dp_shard": 1}, "extensions": ["switched_watching"],
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "WATCH_OVERHEAD": str(folder)}
    command = [sys.executable, "-m", "weft", "train", str(folder / "job.yaml")]
    subprocess.run(command, env=env, check=True, stderr=subprocess.DEVNULL)
    found = []
    for rank in range(2):
        rows = [line.split() for line in (folder / f"rank-{rank}").read_text().splitlines()]
        found.append([(float(wall), float(cpu), float(inside)) for _, wall, cpu, inside in rows])
    return found


def differences(ends: list[float]) -> list[float]:
    """Of each block with watching, its share of time above the mean of its neighbours."""
    blocks = [ends[i + BLOCK] - ends[i] for i in range(0, len(ends) - BLOCK, BLOCK)]
    on = range(WARMUP_BLOCKS, len(blocks) - 1, 2)
    return [blocks[i] / ((blocks[i - 1] + blocks[i + 1]) / 2) - 1 for i in on]


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median, by resampling."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-watch-") as folder:
        ranks = run(Path(folder), asked.steps, asked.batch)
    wall = differences([end[0] for end in ranks[0]])
    cpu = differences([sum(rank[i][1] for rank in ranks) for i in range(min(map(len, ranks)))])
    step = statistics.median(b[0] - a[0] for a, b in zip(ranks[0], ranks[0][1:], strict=False))
    last, first = ([rank[i] for rank in ranks] for i in (-1, WARMUP_BLOCKS * BLOCK))
    spent = [sum(end[k] - start[k] for end, start in zip(last, first, strict=True)) for k in (1, 2)]
    result = {"steps": asked.steps, "blocks": len(wall), "step_s": step, "inside": 2 * spent[1] / spent[0]}
    for name, found in (("time", wall), ("processor_time", cpu)):
        result |= {name: statistics.median(found), f"{name}_95": interval(found)}
    if asked.json:
        print(json.dumps(result))
        return
    print(f"step {step * 1e3:.1f} ms, {len(wall)} blocks of {BLOCK} steps with watching")
    print(f"processor time inside watching   {result['inside']:7.2%}, of steps with it")
    for name in ("time", "processor_time"):
        low, high = result[f"{name}_95"]
        print(f"overhead of {name.replace('_', ' '):15} {result[name]:7.2%}  (95 %: {low:.2%} to {high:.2%})")


if __name__ == "__main__":
    main()
