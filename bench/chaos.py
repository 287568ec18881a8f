"""The cost of faults: detection, resumption and lost steps by kind, also of torchrun, torchft and NVIDIA's restart.

    python bench/chaos.py [--parts kills,hangs,…] [--trials 45] [--others 5] [--minutes 10] [--again]

Each part is one long run of `weft chaos`, or a few runs of another system in the same harness; its result is kept in
runs/bench-chaos, so an interrupted bench continues with the missing parts (--again measures all of them again). The
table is written to bench/chaos.md. torchft and nvidia-resiliency-ext are measured where the environment
variable WEFT_PEERS names a folder that holds them:

    pip install --target .peers --no-deps torchft==0.2.0 nvidia-resiliency-ext==0.4.1 …and what they import
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chaos_others
import chaos_slow

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "bench-chaos"
PAGE = ROOT / "bench" / "chaos.md"
STEPS = 400

JOB = {
    "name": "bench", "model": {"family": "llama", "dim": 128, "layers": 2, "heads": 4, "ffn": 256},
    "data": {"source": "pydoc", "seq_len": 64}, "train": {"steps": STEPS, "global_batch": 16, "eval_every": 100},
    "optim": {"lr": 1e-3}, "cluster": {"device": "cpu"}, "parallel": {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    "checkpoint": {"every": 50}, "runs_dir": str(RESULTS),
}  # fmt: skip

AIMS: dict[str, tuple[str, str, str]] = {
    "kill": ("0.5", "2", "1"), "kill, rank 0": ("2", "5", "1"), "supervisor": ("2", "5", "1"),
    "stop": ("3", "5", "1"), "sleep": ("3", "5", "1"), "gil": ("3", "5", "1"), "term": ("at once", "–", "0"),
    "nan": ("same step", "–", "the batch"), "spike": ("3 steps", "–", "the batch"), "bitflip": ("K steps", "–", "K"),
    "slow": ("10 steps", "–", "0"), "oom": ("at once", "–", "0"), "diskfull": ("at once", "–", "0"),
    "corrupt": ("before load", "–", "to the one before"), "node": ("3", "10", "1"), "partition": ("3", "5", "0"),
}  # fmt: skip
"""Seconds to detect and resume, and steps lost, at most."""


def weft_parts(kills: int, others: int) -> dict[str, list[str]]:
    """Arguments of `weft chaos`, by part."""
    n = others
    return {
        "kills": ["--faults", f"kill:{kills},kill:{n}@0,supervisor:{n}"],
        "hangs": ["--faults", f"stop:{n},sleep:{n},gil:{n}"],
        "stops": ["--faults", f"term:{n},corrupt:{n}"],
        "numbers": ["--faults", f"nan:{n},bitflip:{n},spike:{n}"],
        "machine": ["checkpoint.every=10", "--faults", f"oom:{n},diskfull:{n},slow:{n}"],
        "nodes": ["--faults", f"node:{n},partition:{n}", "--nodes", "2", "--nproc", "2"],
        "promise": ["--faults", "random:10"],
    }


STEPS_OF_PART = {"machine": 600}
"""Steps of parts whose faults take long: a rank stays slow until work is moved, and a disk stays full until a
checkpoint was written to it."""


def chaos(arguments: list[str], steps: int = STEPS) -> dict[str, Any]:
    """Run one experiment and show its output."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    job = RESULTS / "job.yaml"
    job.write_text(json.dumps(JOB))
    command = [sys.executable, "-m", "weft", "chaos", str(job), f"train.steps={steps}", "--json", "--seed", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=env, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"weft chaos ended with code {done.returncode} and printed nothing")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ten_minutes(minutes: float) -> dict[str, Any]:
    """A run of so many minutes with a fault about every half minute."""
    kept = RESULTS / "bench-chaos" / "undisturbed" / "metrics.jsonl"
    if not kept.exists():  # how long a step takes is not known yet
        chaos(["--faults", "kill"])
    records = kept.read_text().splitlines()
    usual = statistics.median(json.loads(line)["step_time_s"] for line in records)
    return chaos(["--faults", "random:1000", "--every", "30", "--no-compare"], steps=int(0.9 * 60 * minutes / usual))


def parts(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        name: partial(chaos, words, STEPS_OF_PART.get(name, STEPS))
        for name, words in weft_parts(args.trials, args.others).items()
    }
    found["quota"] = lambda: [chaos_slow.trial(0.5) for _ in range(args.others)]
    found["long"] = lambda: ten_minutes(args.minutes)
    for case in chaos_others.NAMES:
        found[case] = partial(kills_and_stops, case, args.others)
    return found


def kills_and_stops(case: str, kills: int) -> list[Any]:
    """The trials of another trainer."""
    return [*chaos_others.trials(case, "kill", kills, 1), *chaos_others.trials(case, "stop", 2, 1)]


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    """The table: a row for each kind, Weft's first."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for name in weft_parts(1, 1):
        for fault in results.get(name, {}).get("faults", ()):
            kind = "kill, rank 0" if fault["kind"] == "kill" and fault["rank"] == 0 else fault["kind"]
            by_kind.setdefault(kind, []).append(fault)
    rows = [
        ["weft", kind, f"{sum(f['resume_s'] is not None for f in by_kind[kind])} of {len(by_kind[kind])}",
         *spread([f["detect_s"] for f in by_kind[kind]]), *spread([f["resume_s"] for f in by_kind[kind]]),
         worst([f["steps_lost"] for f in by_kind[kind]]), " / ".join(aim)]
        for kind, aim in AIMS.items() if kind in by_kind
    ]  # fmt: skip
    for case, name in chaos_others.NAMES.items():
        for kind in ("kill", "stop"):
            found = [f for f in results.get(case, ()) if f["kind"] == kind]
            if found:
                back = sum(f["resume_s"] is not None for f in found)
                resumed = spread([f["resume_s"] for f in found])
                lost = worst([f["steps_lost"] for f in found])
                rows.append([name, kind, f"{back} of {len(found)}", "–", "–", *resumed, lost, ""])
    return rows


def spread(values: list[float | None]) -> tuple[str, str]:
    """Median and worst, in seconds; `never` is the worst of all."""
    known = [v for v in values if v is not None]
    if not known:
        return "never", "never"
    return f"{statistics.median(known):.2f}", "never" if len(known) < len(values) else f"{max(known):.2f}"


def worst(values: list[int | None]) -> str:
    return str(max((v for v in values if v is not None), default="–"))


HEAD = ["system", "fault", "resumed", "detect s, median", "worst", "resume s, median", "worst", "steps lost, worst",
        "aim: detect / resume / lost"]  # fmt: skip


def page(results: dict[str, Any]) -> str:
    rows = rows_of(results)
    table = ["| " + " | ".join(cells) + " |" for cells in [HEAD, ["---"] * len(HEAD), *rows]]
    words = [
        "# What faults cost",
        "",
        "Written by `python bench/chaos.py` (parts, flags and peers: its docstring). Four CPU ranks on "
        f"{os.cpu_count()} cores, dp_replicate 2 × dp_shard 2 (the others: DDP of four); every figure from the "
        "moment of the fault to the first step committed after it.",
        "",
        *table,
        "",
        "Faults follow one another within seconds, except in `long`, which has one every half minute: the effective "
        "ratios below are not those of an ordinary run. `term` and `corrupt` end the run and start it again: their "
        "seconds include the save, the exit, and one import of torch. A full disk is detected by the next checkpoint, "
        "which is up to 10 steps away.",
        "",
    ]
    runs = {n: r for n, r in results.items() if isinstance(r, dict)}
    for name, run in runs.items():
        equal = {True: "bit for bit the undisturbed run", False: "other bits", None: "not compared"}[
            run["bitwise_equal"]
        ]
        words.append(
            f"- {name}: {'finished' if run['finished'] else 'did not finish'}, {len(run['faults'])} faults in "
            f"{run['seconds']:.0f} s, {run['samples_lost']} samples lost, {run['samples_repeated']} read twice, "
            f"effective {run['effective_ratio']:.3f}, {equal}"
        )
    return "\n".join([*words, *quota_words(results.get("quota", []))]) + "\n"


def quota_words(trials: list[dict[str, Any]]) -> list[str]:
    """What bench/chaos_slow.py found of a rank under a CPU quota."""
    if not trials:
        return []
    named, moved = ([t[f"{what}_after_steps"] for t in trials] for what in ("named", "moved"))
    back = [t["regained_same_speed"] for t in trials]
    right = sum(t["named_rank"] == 1 for t in trials)
    return [
        "",
        f"A rank held at half of its processor time (two ranks with a quota of half a core each, "
        f"`python bench/chaos_slow.py`, {len(trials)} runs): named in {right} of them, after {in_steps(named)} steps "
        f"(aim: 10); sequences moved after {in_steps(moved)} steps; regained of the throughput that moving work can "
        f"bring back, at the same processor time of a step, {statistics.median(back):.0%}, at least {min(back):.0%} "
        "(aim: 80 %).",
    ]


def in_steps(values: list[int | None]) -> str:
    known = sorted(v for v in values if v is not None)
    most = "never" if len(known) < len(values) else str(known[-1])
    return f"{statistics.median(known):.0f} (at most {most})" if known else "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", help="which, with commas between them; left out: all")
    parser.add_argument("--trials", type=int, default=45, help="kills, beside those of rank 0")
    parser.add_argument("--others", type=int, default=5, help="faults of every other kind")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the long run")
    parser.add_argument("--again", action="store_true", help="measure the parts even if their results are there")
    args = parser.parse_args()
    todo = parts(args)
    wanted = args.parts.split(",") if args.parts else list(todo)
    if unknown := [w for w in wanted if w not in todo]:
        raise SystemExit(f"no part is named {unknown[0]}; parts: {', '.join(todo)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        kept = RESULTS / f"{name}.json"
        if kept.exists() and not args.again:
            continue
        if name in chaos_others.NAMES and (why := chaos_others.missing(name)):
            print(why, file=sys.stderr)
            continue
        began = time.monotonic()
        print(f"{name} …", file=sys.stderr, flush=True)
        kept.write_text(json.dumps(todo[name](), indent=1))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    results = {n: json.loads((RESULTS / f"{n}.json").read_text()) for n in todo if (RESULTS / f"{n}.json").exists()}
    PAGE.write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
