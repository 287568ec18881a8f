"""Seconds from `weft launch` to the first step: on this machine, and by a Slurm of one node on this machine.

    python bench/launch_start.py [--repeat 3] [--json]       # needs slurmctld, slurmd and munged

Both train the same job on the same number of ranks. Times are of the wall clock, from the start of the command to the
first line of metrics.jsonl; the two targets take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.real_clusters import SlurmCluster  # noqa: E402

LIMIT_S = 180.0
JOB: dict[str, Any] = {
    "model": {"shape": "tiny"}, "data": {"source": "synthetic", "seq_len": 16},
    "train": {"steps": 3, "global_batch": 4, "eval_every": 0},
    "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 2}, "checkpoint": {"every": 0},
}  # fmt: skip


def seconds_to_first_step(folder: Path, target: str, name: str, env: dict[str, str]) -> dict[str, float]:
    """Launch and return the seconds until the submission, the first output and the first step."""
    command = [sys.executable, "-m", "weft", "launch", "job.yaml", "--on", target, f"name={name}"]
    began, metrics = time.monotonic(), folder / "runs" / name / "metrics.jsonl"
    record = folder / "runs" / name / "launch" / "record.json"
    found: dict[str, float] = {}
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
        while "first_step" not in found:
            if record.exists():
                found.setdefault("submitted", time.monotonic() - began)
            if metrics.exists() and b"\n" in metrics.read_bytes():
                found["first_step"] = time.monotonic() - began
            if process.poll() is not None and "first_step" not in found:
                raise SystemExit(f"{target} ended before its first step: {process.stderr and process.stderr.read()}")
            if time.monotonic() - began > LIMIT_S:
                process.kill()
                raise SystemExit(f"{target} took no step within {LIMIT_S:.0f} s")
            time.sleep(0.01)
        process.communicate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times: dict[str, list[dict[str, float]]] = {"local": [], "slurm": []}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="weft-start-") as made, SlurmCluster() as slurm:
        folder = Path(made)
        (folder / "job.yaml").write_text(yaml.safe_dump(JOB), encoding="utf-8")
        env = {**os.environ, **slurm.env, "PYTHONPATH": path}
        for i in range(options.repeat):
            for target, found in times.items():
                found.append(seconds_to_first_step(folder, target, f"{target}-{i}", env))
    rows = {
        target: {key: statistics.median(each[key] for each in found) for key in ("submitted", "first_step")}
        for target, found in times.items()
    }
    rows["difference"] = {key: rows["slurm"][key] - rows["local"][key] for key in rows["local"]}
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print("| | submitted, s | first step, s |\n|---|---|---|")
        for name, row in rows.items():
            print(f"| {name} | {row['submitted']:.2f} | {row['first_step']:.2f} |")


if __name__ == "__main__":
    main()
