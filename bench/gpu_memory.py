"""Peak memory and step time of Weft's own jobs on one GPU, predicted and measured; each job in its own process.

    python -m weft calibrate            # once: writes hardware/NAME.json, which step times are predicted from
    python bench/gpu_memory.py [--steps 4] [--jobs 0 3 5] [--json]

Measured memory is torch.cuda.max_memory_allocated over real steps; the median of the steps after the first two is the
time. Jobs that run out of memory are reported, with whether the plan predicted that they fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

JOBS: tuple[tuple[str, int, int, int, str], ...] = (
    ("llama-1b", 2048, 1, 1, "none"),
    ("llama-1b", 2048, 4, 2, "none"),
    ("llama-1b", 8192, 1, 1, "none"),
    ("llama-1b", 8192, 2, 1, "selective"),
    ("llama-1b", 8192, 2, 2, "full"),
    ("llama-1b", 32768, 1, 1, "full"),
    ("llama-3b", 2048, 4, 1, "none"),
    ("llama-3b", 8192, 1, 1, "selective"),
    ("llama-3b", 8192, 1, 2, "full"),
    ("llama-3b", 32768, 1, 1, "full"),
)
"""shape, tokens in a sequence, microbatch, microbatches a step, recompute"""
AIM_MEMORY, AIM_TIME = 0.03, 0.05


def make(index: int) -> Any:
    from weft.job import parse_job

    shape, seq, microbatch, count, recompute = JOBS[index]
    return parse_job(
        {
            "name": "-".join(map(str, JOBS[index])),
            "model": {"shape": shape},
            "data": {"source": "synthetic", "seq_len": seq},
            "train": {"global_batch": count * microbatch, "microbatch": microbatch, "eval_every": 0},
            "cluster": {"device": "cuda", "nodes": 1, "devices_per_node": 1},
            "precision": "bf16",
            "memory": {"recompute": recompute},
        }
    )


def measure(asked: Any, steps: int) -> dict[str, Any]:
    """The measured and the predicted figures of a job, after a few steps of it."""
    import torch

    from weft.data.loader import Loader, to_device
    from weft.data.open_dataset import open_dataset
    from weft.hardware.catalog import find_device
    from weft.hardware.measured import load_measured
    from weft.hardware.probe import probe
    from weft.mesh import connect
    from weft.planner import make_plan
    from weft.planner.ranks import device_memory
    from weft.planner.time.measured_device import step_seconds
    from weft.training.build import build_state
    from weft.training.step import Stepper

    job, plan = make_plan(asked)
    measured = load_measured(plan.device_name)
    limit = device_memory(job, find_device(plan.device_name), probe(), 1)
    promised = plan.predicted["memory_gib"]
    row: dict[str, Any] = {
        "job": job.name,
        "predicted_gib": promised,
        "says_fits": promised <= limit,
        "predicted_s": step_seconds(job, plan, measured) if measured else None,
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
        given = [next(loader) for _ in range(2)]
        for step in range(steps):
            batches = [to_device(b, mesh.device) for b in given[step % 2]]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--jobs", type=int, nargs="+", default=list(range(len(JOBS))))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(make(args.one), args.steps)))
        return
    rows = []
    for index in args.jobs:
        command = [sys.executable, __file__, "--one", str(index), "--steps", str(args.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"job {index} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        rows.append(row)
        if not args.json:
            print(line(row), flush=True)
    memory = [abs(r["predicted_gib"] / r["measured_gib"] - 1) for r in rows if r["fits"]]
    speed = [abs(r["predicted_s"] / r["measured_s"] - 1) for r in rows if r["fits"] and r["predicted_s"]]
    false_fits = sum(r["says_fits"] and not r["fits"] for r in rows)
    if args.json:
        print(json.dumps({"rows": rows, "false_fits": false_fits}, indent=2))
        return
    if memory:
        print(
            f"\nmemory: mean error {sum(memory) / len(memory):.1%}, worst {max(memory):.1%} (aims {AIM_MEMORY:.0%}, 6%)"
        )
    if speed:
        print(f"step time: mean error {sum(speed) / len(speed):.1%} (aim {AIM_TIME:.0%}), worst {max(speed):.1%}")
    print(f"said to fit, and did not: {false_fits}")


def line(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return f"{row['job']:28} predicted {row['predicted_gib']:7.2f} GiB: out of memory"
    text = f"{row['job']:28} predicted {row['predicted_gib']:7.2f} GiB, measured {row['measured_gib']:7.2f}"
    text += f" ({row['predicted_gib'] / row['measured_gib'] - 1:+.1%})"
    if row["predicted_s"]:
        text += f"; {row['predicted_s']:.3f} s, measured {row['measured_s']:.3f}"
        text += f" ({row['predicted_s'] / row['measured_s'] - 1:+.1%})"
    return text


if __name__ == "__main__":
    main()
