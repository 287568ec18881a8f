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
AT, STEPS, LAST = 30, 120, 30
PERIOD_US = 20_000
JOB = {
    "name": "slow", "model": {"family": "llama", "dim": 128, "layers": 3, "heads": 4, "ffn": 384},
    "data": {"source": "pydoc", "seq_len": 128}, "optim": {"lr": 1e-3}, "cluster": {"device": "cpu"},
    "train": {"steps": STEPS, "global_batch": 24, "microbatch": 2, "eval_every": 0},
    "parallel": {"dp_replicate": 2, "dp_shard": 1}, "checkpoint": {"every": 0},
}  # fmt: skip


def set_quota(folder: Path, cores: float) -> None:
    """The quota of a control group, of either version, and ten times the usual weight."""
    quota = int(PERIOD_US * cores)
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        (folder / "cpu.weight").write_text("1000")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
        (folder / "cpu.shares").write_text("10240")


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


def trial(share: float, cores: float = 0.5) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        job, run = Path(folder) / "job.yaml", Path(folder) / "slow"
        job.write_text(json.dumps({**JOB, "runs_dir": folder}))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "weft", "train", str(job)]
        train = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def steps(count: int) -> int:
            while (done := len(lines(run / "metrics.jsonl"))) < count and train.poll() is None:
                time.sleep(0.05)
            return done

        held = steps(1)
        with quotas([process_of(train.pid, rank) for rank in (0, 1)], cores) as reduce:
            steps(AT)
            means = reduce(share)
            struck = len(lines(run / "metrics.jsonl"))
            train.wait()
        output = [e for e in lines(run / "events.jsonl") if e.get("fault") == "slow_rank"]
        seconds = [r["step_time_s"] for r in lines(run / "metrics.jsonl")]
    named = next((e for e in output if e["event"] == "fault" and e["step"] > struck), None)
    moved = next((e for e in output if e["event"] == "recovered" and e["step"] > struck), None)
    first = moved["step"] if moved else STEPS - LAST
    tokens = JOB["train"]["global_batch"] * JOB["data"]["seq_len"]  # type: ignore[index]
    parts = (seconds[held + 6 : struck - 1], seconds[struck + 1 : first - 1], seconds[-LAST:])
    before, during, after = (tokens / statistics.mean(part) for part in parts)
    best = before * (1 + during / before) / 2
    return {
        "means": means, "cores": cores, "share": share,
        "before": before, "during": during, "after": after, "best": best,
        "regained": (after - during) / (best - during),
        "named_after_steps": named["step"] - struck if named else None,
        "named_rank": named["rank"] if named else None,
        "moved_after_steps": moved["step"] - struck if moved else None,
        "shares": [e["shares"] for e in output if e["event"] == "recovered"],
        "moved_at": [e["step"] for e in output if e["event"] == "recovered"],
        "load": os.getloadavg()[0],
    }  # fmt: skip


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
