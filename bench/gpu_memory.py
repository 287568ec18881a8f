"""Peak memory and step time of Weft's own jobs on one GPU, predicted and measured; each job in its own process.

    python -m weft calibrate            # once: writes hardware/NAME.json, which step times are predicted from
    python bench/gpu_memory.py [--steps 4] [--jobs 0 3 5] [--json rows.json]

Measured memory is torch.cuda.max_memory_allocated over real steps; the median of the steps after the first two is the
time. Jobs that run out of memory are reported, with whether the plan predicted that they fit.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

JOBS: tuple[tuple[Any, ...], ...] = (
    ("llama-1b", 2048, 1, 1, "none", "bf16"),
    ("llama-1b", 2048, 4, 2, "none", "bf16"),
    ("llama-1b", 8192, 1, 1, "none", "bf16"),
    ("llama-1b", 8192, 2, 1, "selective", "bf16"),
    ("llama-1b", 8192, 2, 2, "full", "bf16"),
    ("llama-1b", 32768, 1, 1, "full", "bf16"),
    ("llama-3b", 2048, 4, 1, "none", "bf16"),
    ("llama-3b", 8192, 1, 1, "selective", "bf16"),
    ("llama-1b", 8192, 2, 1, "none", "fp8"),
    ("llama-3b", 8192, 1, 1, "none", "fp8"),
    ("llama-1b", 8192, 2, 1, "none", "fp8-dynamic"),
    ("llama-3b", 8192, 1, 1, "none", "fp8-dynamic"),
    ("llama-3b", 8192, 1, 2, "full", "bf16"),
    ("llama-3b", 32768, 1, 1, "full", "bf16"),
)
"""shape, tokens in a sequence, microbatch, microbatches a step, recompute, precision"""
DYNAMIC = {"amax": "dynamic", "head": False}
"""Scales of each tensor's own values, and the head in bf16."""
LOCK = Path(tempfile.gettempdir()) / "weft-gpu-bench.lock"
AIM_MEMORY, AIM_TIME = 0.03, 0.05


def make(index: int) -> dict[str, Any]:
    """The job of a row of JOBS."""
    shape, seq, microbatch, count, recompute, precision = JOBS[index]
    return {
        "name": "-".join(map(str, JOBS[index])),
        "model": {"shape": shape},
        "data": {"source": "synthetic", "seq_len": seq},
        "train": {"global_batch": count * microbatch, "microbatch": microbatch, "eval_every": 0},
        "cluster": {"device": "cuda", "nodes": 1, "devices_per_node": 1},
        "precision": precision.removesuffix("-dynamic"),
        "fp8": DYNAMIC if precision.endswith("-dynamic") else {},
        "memory": {"recompute": recompute},
    }


@cache
def take_turn() -> None:
    """Wait until no other of these processes measures its steps; lasts until the process ends."""
    fcntl.flock(os.open(LOCK, os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX)


def measure(given: dict[str, Any], steps: int) -> dict[str, Any]:
    """The measured and the predicted figures of a job, after a few steps of it. Memory is the allocator's."""
    import torch

    from weft.data.loader import Loader, to_device
    from weft.data.open_dataset import open_dataset
    from weft.hardware.catalog import find_device
    from weft.hardware.probe import probe
    from weft.job import parse_job
    from weft.mesh import connect
    from weft.planner import make_plan
    from weft.planner.ranks import device_memory
    from weft.training.build import build_state
    from weft.training.step import Stepper

    job, plan = make_plan(parse_job(given))
    limit = device_memory(job, find_device(plan.device_name), probe(), 1)
    promised = plan.predicted["memory_gib"] - plan.predicted["runtime_gib"]
    row: dict[str, Any] = {
        "given": given,
        "predicted_gib": promised,
        "says_fits": plan.predicted["memory_gib"] <= limit,
        "predicted_s": plan.predicted.get("step_time_s"),
        "predicted": plan.predicted,
    }
    times = []
    try:
        mesh = connect(plan)
        stepper = Stepper(job, plan, mesh, build_state(job, plan, mesh))
        loader = Loader(
            open_dataset(job), seed=0, global_batch=job.train.global_batch, microbatch=plan.microbatch, dp_rank=0,
            dp_size=1, prefetch=0,
        )  # fmt: skip
        samples = [next(loader) for _ in range(2)]
        for step in range(steps):
            if step == 1:  # compiled
                take_turn()
            batches = [to_device(b, mesh.device) for b in samples[step % 2]]
            torch.cuda.synchronize()
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            stepper.update(stepper.gradients(batches), 1e-4)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        row["measured_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        row["measured_s"] = statistics.median(times[2:] or times[-1:])
        row["fits"] = True
    except torch.cuda.OutOfMemoryError:
        row["fits"] = False
    return row


def run(given: dict[str, Any], steps: int) -> dict[str, Any]:
    """A job's figures, from a process of its own; none if it fails."""
    command = [sys.executable, __file__, "--one", json.dumps(given), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"failed: {given} {done.stderr.strip().splitlines()[-3:]}", flush=True)
        return {}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(line(row), flush=True)
    return row


def report(rows: list[dict[str, Any]], path: str | None) -> None:
    """Print the errors of the predictions, and write the rows to a file."""
    for name, unit, aim in ("memory", "gib", AIM_MEMORY), ("step time", "s", AIM_TIME):
        pairs = [(row[f"predicted_{unit}"], row.get(f"measured_{unit}")) for row in rows if row["fits"]]
        errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted and measured]
        if errors:
            mean, median = statistics.fmean(errors), statistics.median(errors)
            print(f"{name}: {len(errors)} jobs, mean error {mean:.1%} (aim {aim:.0%}), median {median:.1%}, ", end="")
            print(f"worst {max(errors):.1%}")
    print(f"said to fit, and did not: {sum(row['says_fits'] and not row['fits'] for row in rows)}")
    if path:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    if not row["fits"]:
        return f"predicted {row['predicted_gib']:7.2f} GiB: out of memory  {row['given']}"
    text = f"predicted {row['predicted_gib']:7.2f} GiB, measured {row['measured_gib']:7.2f}"
    text += f" ({row['predicted_gib'] / row['measured_gib'] - 1:+.1%})"
    if row["predicted_s"]:
        text += f"; {row['predicted_s']:.4f} s, measured {row['measured_s']:.4f}"
        text += f" ({row['predicted_s'] / row['measured_s'] - 1:+.1%})"
    return f"{text}  {row['given']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--jobs", type=int, nargs="+", default=list(range(len(JOBS))))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="a file for the rows")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(json.loads(args.one), args.steps)))
        return
    report([row for index in args.jobs if (row := run(make(index), args.steps))], args.json)


if __name__ == "__main__":
    main()
