"""Time without work between the kernels of a step on one GPU, and the kernels that take most of it.

    python bench/gpu_gaps.py --shape 1b --precision fp8 [optim.lr=1e-4 …]

Takes the steps of weft's own session, with CUDA's events traced and nothing else, so the host is hardly slowed down.
"""

from __future__ import annotations

import argparse
import collections
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from gpu import weft_job
from shapes import SHAPES
from torch.profiler import ProfilerActivity, profile

from weft.data.loader import to_device
from weft.job import apply_overrides, parse_job
from weft.job.files.run_folder import RunDir
from weft.planner import make_plan
from weft.training.open_session import open_session

WARMUP_STEPS, TIMED_STEPS, TRACED_STEPS = 5, 12, 4
LIMITS_US = (2, 5, 20, 100, 1000)


def traced_kernels(folder: str, session: Any) -> list[dict[str, Any]]:
    """The device's events of some steps, in the order of their start."""
    with closing(session.loader()) as loader:

        def steps(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                batches = [to_device(b, session.mesh.device) for b in next(loader)]
                session.stepper.update(session.stepper.gradients(batches), session.stepper.learning_rate())
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / count * 1e3

        steps(WARMUP_STEPS)
        print(f"{steps(TIMED_STEPS):.1f} ms a step without a trace")
        with profile(activities=[ProfilerActivity.CUDA]):  # the first one starts the tracer, which is slow
            steps(1)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            steps(TRACED_STEPS)
    file = Path(folder) / "trace.json"
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])


def gaps_of(events: list[dict[str, Any]]) -> list[tuple[float, str, str]]:
    """Microseconds in which nothing ran, the event before and the one after."""
    found, end, last = [], events[0]["ts"], ""
    for event in events:
        if event["ts"] > end:
            found.append((event["ts"] - end, last, event["name"]))
        if event["ts"] + event["dur"] > end:
            end, last = event["ts"] + event["dur"], event["name"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--kernels", type=int, default=40)
    parser.add_argument("changes", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raw = weft_job(SHAPES[asked.shape], asked.precision, folder)
        job, plan = make_plan(parse_job(apply_overrides(raw, asked.changes)), 1)
        events = traced_kernels(folder, open_session(job, plan, RunDir(Path(folder) / "run")))
    gaps = gaps_of(events)
    idle = sum(gap[0] for gap in gaps) / TRACED_STEPS / 1e3
    print(f"{len(events) / TRACED_STEPS:.0f} kernels and copies a step, {idle:.2f} ms without work")
    for limit in LIMITS_US:
        short = [g[0] for g in gaps if g[0] < limit]
        print(f"  below {limit} µs: {sum(short) / TRACED_STEPS / 1e3:.2f} ms in {len(short) / TRACED_STEPS:.0f} gaps")
    for length, before, after in sorted(gaps, reverse=True)[:10]:
        print(f"  {length:8.1f} µs between {before[:50]} and {after[:50]}")
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        times[f"{event['name'][:90]} {event['args'].get('grid', '')}"].append(event["dur"])
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[: asked.kernels]:
        count, mean = len(each) / TRACED_STEPS, sum(each) / len(each)
        print(f"{count * mean / 1e3:8.2f} ms {count:6.1f} × {mean:8.1f} µs  {name}")


if __name__ == "__main__":
    main()
