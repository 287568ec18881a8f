"""Bursts of kills over every layout: recovery, lost steps and the bits of the result.

    python bench/kill_bursts.py [--bursts 20] [--seed 1] [--layouts tp,cp,…]

For each layout, one run of `weft chaos` with so many bursts: 2 to 6 ranks are killed, each at most a second after the
last one, also those that replace them. Results are kept in runs/bench-kill-bursts, so that an interrupted bench
continues with the missing layouts. The table is written to bench/kill_bursts.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "bench-kill-bursts"
PAGE = ROOT / "bench" / "kill_bursts.md"
STEPS_PER_BURST = 15

JOB: dict[str, Any] = {
    "model": {"family": "llama", "dim": 32, "layers": 4, "heads": 4, "ffn": 64},
    "data": {"source": "pydoc", "seq_len": 32}, "train": {"global_batch": 8, "microbatch": 1, "eval_every": 40,
    "eval_batches": 1}, "cluster": {"device": "cpu"}, "checkpoint": {"every": 50},
    "resilience": {"rebalance": False},
}  # fmt: skip
EXPERTS = {**JOB["model"], "experts": {"count": 4, "top_k": 2, "ffn": 32}}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"parallel": {"dp_replicate": 2}},
    "zero3": {"parallel": {"dp_shard": 2, "zero": 3}},
    "tp": {"parallel": {"tp": 2}},
    "pp": {"parallel": {"pp": 2}},
    "cp": {"parallel": {"cp": 2}},
    "ep": {"parallel": {"dp_shard": 2, "ep": 2}, "model": EXPERTS},
    "dp x tp": {"parallel": {"dp_replicate": 2, "tp": 2}},
    "zero3 x cp": {"parallel": {"dp_shard": 2, "zero": 3, "cp": 2}},
    "pp x tp": {"parallel": {"pp": 2, "tp": 2}},
    "ep x tp": {"parallel": {"dp_shard": 2, "tp": 2, "ep": 2}, "model": EXPERTS},
}


def measure(name: str, bursts: int, seed: int) -> dict[str, Any]:
    """Run one layout, or read what an earlier call of this script has found."""
    folder = RESULTS / f"{name.replace(' ', '')}-{bursts}-{seed}"
    kept = folder / "result.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        job = {**JOB, **LAYOUTS[name], "name": "bursts", "runs_dir": str(folder)}
        job["train"] = {**JOB["train"], "steps": STEPS_PER_BURST * bursts}
        (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "weft", "chaos", str(folder / "job.yaml"), "--json", "--seed", str(seed)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--faults", f"burst:{bursts}"], env=env, stdout=subprocess.PIPE, text=True, check=False
        )
        if not done.stdout:
            raise SystemExit(f"weft chaos ended with code {done.returncode} and printed nothing")
        kept.write_text(done.stdout, encoding="utf-8")
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def page(results: dict[str, dict[str, Any]]) -> str:
    """The tables by layout and by number of kills."""
    lines = [
        "# Bursts of kills", "", "Written by `python bench/kill_bursts.py`: 2 to 6 kills, each at most a second after "
        "the last one, of ranks and of those that replace them.", "",
        "| layout | bursts | recovered | steps lost at most | resumed after, median and worst | end of the run |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    by_kills: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, result in results.items():
        faults = result["faults"]
        for fault in faults:
            by_kills[fault["phase"]].append(fault)
        equal = "bit for bit the undisturbed run" if result["bitwise_equal"] else "the weights differ"
        end = equal if result["finished"] else f"did not finish: {result['why']}"
        if result["samples_lost"] or result["samples_repeated"]:
            end += f"; {result['samples_lost']} samples lost, {result['samples_repeated']} read twice"
        lines.append(f"| {name} | {_row(faults)} | {end} |")
    lines += ["", "| kills | bursts | recovered | steps lost at most | resumed after, median and worst |"]
    lines += ["|---|---|---|---|---|", *(f"| {k.split()[0]} | {_row(v)} |" for k, v in sorted(by_kills.items()))]
    every = [fault for faults in by_kills.values() for fault in faults]
    return "\n".join([*lines, f"| all | {_row(every)} |", ""])


def _row(faults: list[dict[str, Any]]) -> str:
    seconds = [f["resume_s"] for f in faults if f["resume_s"] is not None]
    lost = max((f["steps_lost"] for f in faults if f["steps_lost"] is not None), default=0)
    times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f} s" if seconds else "–"
    return f"{len(faults)} | {len(seconds)} | {lost} | {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bursts", type=int, default=20, help="bursts of each layout")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in args.layouts.split(","):
        results[name] = measure(name, args.bursts, args.seed)
        PAGE.write_text(page(results), encoding="utf-8")
        print(f"{name}: {'finished' if results[name]['finished'] else results[name]['why']}", flush=True)
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
