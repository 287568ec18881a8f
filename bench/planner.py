"""How fast the planner is: estimates a second, whole commands, whole spaces, and planning again after a node is lost.

python bench/planner.py [--json] [--write]

--write puts the table into bench/planner.md, with the commit and the date.

Estimates a second: all layouts of a space, in one call of a new estimator, over the seconds of the call; each has its
step time and the peak memory of its fullest rank. Layouts that differ only in what does not change their memory (as
styles of cp) are traced once, as in a search. One thread; processor time is time.process_time of this process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml

from weft.job import parse_job
from weft.job.shapes import resolve
from weft.planner.estimator import Estimator, make_estimator
from weft.planner.make_plan import make_plan, start_plan
from weft.planner.search.branch_and_bound import find_layouts
from weft.planner.search.space import Space, all_layouts, job_space

PAGE = Path(__file__).with_suffix(".md")
TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
LARGE = ("llama-405b", "h100-sxm", 2048, 8192, 2048)
SPACES = {
    "llama-405b on 16,384 H100": LARGE,
    "deepseek-v3-671b on 2,048 H800": ("deepseek-v3-671b", "h800-sxm", 256, 4096, 15360),
}
REPEATS = 3


def described(model: str, device: str, nodes: int, seq: int, batch: int) -> dict[str, Any]:
    return {
        "model": model, "data": {"source": "synthetic", "seq_len": seq}, "train": {"global_batch": batch},
        "cluster": {"device": device, "nodes": nodes, "devices_per_node": 8},
    }  # fmt: skip


def setting(job: dict[str, Any]) -> tuple[Space, Estimator]:
    start = start_plan(resolve(parse_job(job)))
    estimator = make_estimator(start.job, start.plan, start.world, start.device, start.memory_gib)
    return job_space(start.job, start.world, "bf16"), estimator


def least(run: Callable[[], Any], cpu: Callable[[], float] = time.process_time) -> tuple[float, float, Any]:
    """Least wall and processor seconds of several runs, as other programs only add to them."""
    walls, cpus, made = [], [], None
    for _ in range(REPEATS):
        wall, before = time.perf_counter(), cpu()
        made = run()
        walls.append(time.perf_counter() - wall)
        cpus.append(cpu() - before)
    return min(walls), min(cpus), made


def row(what: str, aim: str, value: float, by_cpu: float, note: str = "") -> dict[str, Any]:
    return {"what": what, "aim": aim, "value": value, "by processor time": by_cpu, "note": note}


def command_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure() -> list[dict[str, Any]]:
    rows = []
    space, estimator = setting(described("llama-70b", "h100-sxm", 32, 8192, 1024))
    layouts = all_layouts(space)
    assert estimator.engine is not None
    job, plan = estimator.engine.job, estimator.engine.plan
    start = start_plan(job)

    def estimate() -> None:  # a new estimator, which has nothing to look up
        make_estimator(job, plan, start.world, start.device, start.memory_gib).estimate(layouts)

    wall, cpu, _ = least(estimate)
    note = f"{len(layouts):,} layouts of llama-70b on 256 H100"
    rows.append(row("estimates of time and memory a second", "300,000", len(layouts) / wall, len(layouts) / cpu, note))
    wall, cpu, _ = least(lambda: estimator.estimate_time(layouts).step_time_s)
    rows.append(row("estimates of time alone a second", "", len(layouts) / wall, len(layouts) / cpu))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.yaml"
        path.write_text(yaml.safe_dump(described(*LARGE)), encoding="utf-8")
        command = [sys.executable, "-m", "weft", "plan", str(path)]
        wall, cpu, _ = least(lambda: subprocess.run(command, check=True, capture_output=True), command_seconds)
    rows.append(row("`weft plan` of llama-405b on 16,384 H100, whole command, s", "3", wall, cpu))
    for name, given in SPACES.items():
        wall, cpu, found = least(partial(search, given))
        note = f"{found.size:,} layouts, {found.estimated:,} estimated: {found.layouts.plan(0).layout()}"
        rows.append(row(f"search of {name}, s", "", wall, cpu, note))
    model, device, nodes, seq, _ = LARGE
    smaller = described(model, device, nodes - 1, seq, nodes - 1)
    wall, cpu, found = least(lambda: find_layouts(*setting(smaller)))
    rows.append(row("search of llama-405b on 16,376 H100, a node lost, s", "1", wall, cpu, f"{found.size:,} layouts"))
    demo = parse_job({"model": "tiny", "train": {"global_batch": 16}, "cluster": {"device": "cpu"}})
    wall, cpu, _ = least(lambda: make_plan(demo, 2))
    rows.append(row("`make_plan` of a small job on 2 CPU ranks, s", "0.3", wall, cpu))
    return rows


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def page(rows: list[dict[str, Any]]) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    load = os.getloadavg()[0]
    head = f"Commit {commit.strip()}, {datetime.date.today()}, {os.cpu_count()} cores, load average {load:.1f}:"
    lines = ["| what | aim | measured | by processor time | |", "|---|---:|---:|---:|---|"]
    lines += [
        f"| {r['what']} | {r['aim']} | {figure(r['value'])} | {figure(r['by processor time'])} | {r['note']} |"
        for r in rows
    ]
    return "\n".join([head, "", *lines])


def search(given: Any) -> Any:
    """The five best layouts of a space."""
    return find_layouts(*setting(described(*given)), top=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the table into bench/planner.md")
    asked = parser.parse_args()
    rows = measure()
    if asked.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(lambda found: f"{found[1]}{page(rows)}\n{found[2]}", text), encoding="utf-8")
    if asked.json:
        print(json.dumps(rows, indent=2))
        return
    for r in rows:
        cpu = figure(r["by processor time"])
        print(f"{r['what']:60} {figure(r['value']):>10}   by processor time {cpu}   {r['note']}")


if __name__ == "__main__":
    main()
