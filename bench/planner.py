"""How fast the planner is: candidates a second, whole spaces, and planning again after a node is lost.

python bench/planner.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from weft.job import parse_job
from weft.job.shapes import resolve
from weft.planner.estimator import Estimator, make_estimator
from weft.planner.make_plan import make_plan, start_plan
from weft.planner.search.search import CHUNK, find_layouts
from weft.planner.search.space import Space, all_layouts, job_space

JOBS = {
    "llama-405b on 16,384 H100": ("llama-405b", "h100-sxm", 2048, 8192, 2048),
    "deepseek-v3-671b on 2,048 H800": ("deepseek-v3-671b", "h800-sxm", 256, 4096, 15360),
}
AIMS = {"candidates a second": 100_000, "whole space, s": 5.0, "after losing a node, s": 1.0}


def described(model: str, device: str, nodes: int, seq: int, batch: int) -> Any:
    return resolve(
        parse_job(
            {
                "model": model,
                "data": {"source": "synthetic", "seq_len": seq},
                "train": {"global_batch": batch},
                "cluster": {"device": device, "nodes": nodes, "devices_per_node": 8},
            }
        )
    )


def setting(job: Any) -> tuple[Space, Estimator]:
    start = start_plan(job)
    estimator = make_estimator(start.job, start.plan, start.world, start.device, start.memory_gib)
    return job_space(start.job, start.world, "bf16"), estimator


def best_of(times: int, run: Callable[[], Any]) -> tuple[float, float, Any]:
    """The least wall and processor seconds of several runs: other programs only add to them."""
    walls, cpus, made = [], [], None
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        made = run()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus), made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows: list[dict[str, Any]] = []

    space, estimator = setting(described("llama-70b", "h100-sxm", 32, 8192, 1024))
    layouts = all_layouts(space)
    some = [layouts.take(slice(a, a + CHUNK)) for a in range(0, min(len(layouts), 12 * CHUNK), CHUNK)]
    wall, cpu, _ = best_of(3, lambda: [estimator.estimate(part) for part in some])
    number = sum(len(part) for part in some)
    rows.append({"what": "estimates on one core, a second", "value": number / wall, "by processor time": number / cpu})

    for name, arguments in JOBS.items():
        space, estimator = setting(described(*arguments))
        wall, cpu, found = best_of(3, lambda space=space, estimator=estimator: find_layouts(space, estimator, top=5))
        rows.append({"what": f"whole space of {name}, s", "value": wall, "by processor time": cpu,
                     "candidates": found.size, "estimated": found.estimated,
                     "candidates a second": found.size / wall, "winner": found.layouts.plan(0).layout()})  # fmt: skip

    model, device, nodes, seq, _ = JOBS["llama-405b on 16,384 H100"]
    space, estimator = setting(described(model, device, nodes - 1, seq, (nodes - 1)))
    wall, cpu, found = best_of(3, lambda: find_layouts(space, estimator))
    rows.append({"what": "llama-405b on 16,376 H100, a node lost, s", "value": wall, "by processor time": cpu,
                 "candidates": found.size, "winner": found.layouts.plan(0).layout()})  # fmt: skip
    demo = parse_job({"model": "tiny", "train": {"global_batch": 16}, "cluster": {"device": "cpu"}})
    wall, cpu, (_, plan) = best_of(3, lambda: make_plan(demo, 2))
    rows.append({"what": "make_plan of a small job on 2 CPU ranks, s", "value": wall, "by processor time": cpu,
                 "winner": plan.layout()})  # fmt: skip

    if as_json:
        print(json.dumps({"aims": AIMS, "rows": rows}, indent=2))
        return
    for row in rows:
        more = ", ".join(f"{k} {v:,.3g}" if isinstance(v, float) else f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}"
                         for k, v in row.items() if k not in ("what", "value"))  # fmt: skip
        print(f"{row['what']:52} {row['value']:>12,.3f}   {more}")


if __name__ == "__main__":
    main()
