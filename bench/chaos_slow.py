"""A rank with half of its processor time: when it is detected, and how much of the lost throughput is regained.

    python bench/chaos_slow.py [--trials 3] [--share 0.5] [--cores 0.5]

Two CPU ranks train, each in a control group with a quota of half a core and a high weight, so that other load on the
machine does not change their speed. After 30 steps the quota of one is reduced to a share of it and stays there. Three
throughputs of one run, tokens over seconds:

- before: both ranks have the same quota;
- during: one is slow, and the work is still divided evenly;
- after: sequences have moved, over the run's last steps.

The slow rank works at s = during / before of its speed, so two ranks whose work is divided in proportion to their speed
could reach best = before × (1 + s) / 2. What is regained is (after - during) / (best - during): 0 if moving work did
nothing, 1 if the slow rank's missing half is all that is missing. The aim is 0.8. Before itself cannot be reached: half
of a rank's time is gone.

Load on the other threads of the same cores still changes how much a rank computes in a second of processor time, by
several per cent from one minute to the next. The processor time of a step, over both ranks, is therefore measured in
each of the three windows, and `regained_same_speed` uses throughputs at the processor time of the first one. It does
not see work that takes more processor time because it is divided unevenly; `regained` does, with other load in it.

Where no control group can be made, both ranks have what the machine gives them, and the slow one is stopped and
continued in turns; other load then changes the figures.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
AT, STEPS, LAST = 40, 150, 40
PERIOD_US = 20_000
JOB = {
    "name": "slow", "model": {"family": "llama", "dim": 128, "layers": 3, "heads": 4, "ffn": 384},
    "data": {"source": "pydoc", "seq_len": 128}, "optim": {"lr": 1e-3}, "cluster": {"device": "cpu"},
    "train": {"steps": STEPS, "global_batch": 24, "microbatch": 2, "eval_every": 0},
    "parallel": {"dp_replicate": 2, "dp_shard": 1}, "checkpoint": {"every": 0},
}  # fmt: skip


def set_quota(folder: Path, cores: float) -> None:
    """The quota of a control group, of either version, and the highest weight."""
    quota = int(PERIOD_US * cores)
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        (folder / "cpu.weight").write_text("10000")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
        (folder / "cpu.shares").write_text("262144")


def control_group(pid: int, cores: float) -> Path | None:
    """A new control group with this process in it; None where none can be made."""
    for group in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")):
        folder = group / f"weft-slow-{pid}"
        if not os.path.ismount(group) or not (group / "cgroup.procs").exists():  # the other version of control groups
            continue
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                set_quota(folder, cores)
                (folder / "cgroup.procs").write_text(str(pid))
                return folder
            except OSError:
                folder.rmdir()
    return None


@contextlib.contextmanager
def quotas(pids: list[int], cores: float) -> Iterator[Callable[[float], str]]:
    """Give each process this part of a core. Yields what reduces the last one to a share of it and returns by which
    means."""
    groups = [control_group(pid, cores) for pid in pids]
    over = threading.Event()

    def slices(share: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                for number, seconds in ((signal.SIGSTOP, 1 - share), (signal.SIGCONT, share)):
                    os.kill(pids[-1], number)
                    time.sleep(0.02 * seconds)

    thread: threading.Thread | None = None

    def reduce(share: float) -> str:
        nonlocal thread
        if groups[-1] is not None:
            set_quota(groups[-1], cores * share)
            return "quota"
        thread = threading.Thread(target=slices, args=(share,))
        thread.start()
        return "stop and go"

    try:
        yield reduce
    finally:
        over.set()
        if thread is not None:
            thread.join()
        for folder in groups:
            if folder is not None:
                with contextlib.suppress(OSError):  # its process has ended
                    folder.rmdir()


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


class ProcessorTime:
    """The processor time of some processes at each step of a run."""

    def __init__(self, pids: list[int]) -> None:
        self.processes = [psutil.Process(pid) for pid in pids]
        self.at: dict[int, float] = {}

    def note(self, step: int) -> None:
        with contextlib.suppress(psutil.Error):
            times = [process.cpu_times() for process in self.processes]
            self.at.setdefault(step, sum(t.user + t.system for t in times))

    def per_step(self, first: int, last: int) -> float:
        """Seconds a step, between the noted steps nearest inside the window."""
        inside = sorted(step for step in self.at if first <= step <= last)
        return (self.at[inside[-1]] - self.at[inside[0]]) / (inside[-1] - inside[0])


def trial(share: float, cores: float = 0.5) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        job, run = Path(folder) / "job.yaml", Path(folder) / "slow"
        job.write_text(json.dumps({**JOB, "runs_dir": folder}))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "weft", "train", str(job)]
        train = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def steps(count: int, used: ProcessorTime | None = None) -> int:
            while (done := len(lines(run / "metrics.jsonl"))) < count and train.poll() is None:
                if used is not None:
                    used.note(done)
                time.sleep(0.05)
            return done

        held = steps(1)
        pids = [process_of(train.pid, rank) for rank in (0, 1)]
        used = ProcessorTime(pids)
        with quotas(pids, cores) as reduce:
            steps(AT, used)
            means = reduce(share)
            struck = steps(1)
            steps(STEPS, used)
            train.wait()
        output = [e for e in lines(run / "events.jsonl") if e.get("fault") == "slow_rank"]
        seconds = [r["step_time_s"] for r in lines(run / "metrics.jsonl")]
    named = next((e for e in output if e["event"] == "fault" and e["step"] > struck), None)
    moved = next((e for e in output if e["event"] == "recovered" and e["step"] > struck), None)
    first = moved["step"] if moved else STEPS - LAST
    tokens = JOB["train"]["global_batch"] * JOB["data"]["seq_len"]  # type: ignore[index]
    windows = ((held + 6, struck - 1), (struck + 1, first - 1), (STEPS - LAST, STEPS))
    rates = [tokens / statistics.mean(seconds[begin:end]) for begin, end in windows]
    cpu = [used.per_step(*window) for window in windows]
    before, during, after = rates
    return {
        "means": means, "cores": cores, "share": share,
        "before": before, "during": during, "after": after,
        "regained": regained(rates),
        "regained_same_speed": regained([rate * seconds / cpu[0] for rate, seconds in zip(rates, cpu, strict=True)]),
        "cpu_s_per_step": cpu,
        "named_after_steps": named["step"] - struck if named else None,
        "named_rank": named["rank"] if named else None,
        "moved_after_steps": moved["step"] - struck if moved else None,
        "shares": [e["shares"] for e in output if e["event"] == "recovered"],
        "load": os.getloadavg()[0],
    }  # fmt: skip


def regained(rates: list[float]) -> float:
    """Part of the throughput that moving work can bring back, from the throughputs before, during and after."""
    before, during, after = rates
    best = before * (1 + during / before) / 2
    return (after - during) / (best - during)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="of its quota, that the slow rank keeps")
    parser.add_argument("--cores", type=float, default=0.5, help="quota of each rank")
    args = parser.parse_args()
    for _ in range(args.trials):
        print(json.dumps(trial(args.share, args.cores)), flush=True)


if __name__ == "__main__":
    main()
