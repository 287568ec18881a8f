"""Faults on a GPU: seconds from each fault to the next committed step, and a comparison with an undisturbed run.

    python bench/gpu_recovery.py                 # writes bench/gpu-recovery.md and .json
    python bench/gpu_recovery.py --device cpu --kills 2 --others 1      # the same over Gloo, to try the script
    python bench/gpu_recovery.py --compare 2000  # no faults: two ranks against one rank alone

Ranks share one GPU over NCCL. Each group of faults is one run; its losses, gradient norms and final weights are
compared, bit by bit, with those of a run without faults. A second run without faults shows whether the kernels are
deterministic at all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_common import facts, make_parser, parse, write_results

from weft.extensions.chaos.experiment import ExperimentResult, run_experiment, same_weights, undisturbed
from weft.extensions.chaos.fault_injector import Experiment
from weft.job import apply_overrides, parse_job
from weft.job.errors import WeftError
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.watch.journal import read_metrics

JOB: dict[str, Any] = {
    "model": {"family": "llama", "dim": 256, "layers": 6, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 512},
    "data": {"source": "synthetic", "seq_len": 128},
    "train": {"global_batch": 16, "compile": False},
    "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant"},
    "precision": "fp32",
    "checkpoint": {"every": 0},
    "resilience": {"rebalance": False},
}
"""Without rebalancing, which changes the order of sums and so the last digit."""
TIMEOUT_S = 60.0
"""Without a committed step for so long, a group is given up."""


def job_for(name: str, steps: int, folder: Path, asked: argparse.Namespace, *overrides: str) -> Job:
    raw = {**JOB, "name": name, "runs_dir": str(folder), "train": {**JOB["train"], "steps": steps}}
    raw["cluster"] = {"device": asked.device, "share_devices": asked.device == "cuda"}
    return parse_job(apply_overrides(raw, overrides))


def differing_steps(run: RunDir, reference: RunDir) -> list[int]:
    """Steps whose loss or gradient norm differ in any bit."""
    ours, theirs = ({r["step"]: (r["loss"], r["grad_norm"]) for r in read_metrics(x.metrics)} for x in (run, reference))
    return [step for step, values in theirs.items() if ours.get(step) != values]


def control(job: Job, ranks: int, folder: Path) -> bool | None:
    """Whether two runs without faults are the same, bit by bit."""
    first = undisturbed(job, ranks, folder / f"{job.name}-chaos", print)
    second = undisturbed(job, ranks, folder / "again", print)
    return same_weights(first, second) and not differing_steps(first, second)


def against_one_rank(job: Job, reference: RunDir, folder: Path) -> dict[str, float]:
    """Largest relative differences of loss and gradient norm between the undisturbed run and one rank alone."""
    alone = undisturbed(job, 1, folder / "one-rank", print)
    ours, theirs = ({r["step"]: r for r in read_metrics(x.metrics)} for x in (reference, alone))
    found = {
        key: max(abs(ours[step][key] - theirs[step][key]) / abs(theirs[step][key]) for step in theirs)
        for key in ("loss", "grad_norm")
    }
    return {"steps": len(theirs), **found}


def group(
    name: str, ranks: int, faults: str, asked: argparse.Namespace, folder: Path, *overrides: str
) -> dict[str, Any]:
    count = sum(int(word.partition(":")[2] or 1) for word in faults.split(","))
    job = job_for(name, 10 + asked.steps_after * (count + 1), folder, asked, *overrides)
    began = time.monotonic()
    row: dict[str, Any] = {"name": name, "ranks": ranks, "faults": faults, "steps": job.train.steps}
    try:
        if not asked.no_control and name == "kill":
            row["deterministic"] = control(job, ranks, folder)
        found = run_experiment(
            Experiment(job, ranks, faults, timeout_s=asked.timeout), lambda text: print(" ", text, flush=True)
        )
        reference = RunDir(folder / f"{name}-chaos" / "undisturbed")
        row |= result(found, reference)
        print(json.dumps(row, default=str), flush=True)
        if asked.one_rank and name == "kill":
            row["one_rank"] = against_one_rank(job, reference, folder)
    except (WeftError, OSError) as error:
        row["why"] = f"{type(error).__name__}: {error}"
    row["seconds"] = time.monotonic() - began
    kept = asked.to / f"gpu-recovery-{name}"
    shutil.rmtree(kept, ignore_errors=True)
    for run in ("undisturbed", "disturbed"):  # enough to explain a difference
        at = folder / f"{name}-chaos" / run
        for file in (*at.glob("*.jsonl"), *at.glob("logs/*"), at.parent / f"{run}.log"):
            if file.is_file() and file.stat().st_size < 1 << 20:
                (kept / run).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, kept / run / file.name)
    print(json.dumps(row, default=str), flush=True)
    return row


def result(found: ExperimentResult, reference: RunDir) -> dict[str, Any]:
    kinds = {}
    for kind in dict.fromkeys(o.kind for o in found.outcomes):
        own = [o for o in found.outcomes if o.kind == kind]
        seconds = [o.resume_s for o in own if o.resume_s is not None]
        kinds[kind] = {
            "recovered": len(seconds), "injected": len(own), "steps_lost": max(o.steps_lost or 0 for o in own),
            "median_s": statistics.median(seconds) if seconds else None, "worst_s": max(seconds, default=None),
        }  # fmt: skip
    return {
        "finished": found.finished, "why": found.why, "kinds": kinds, "same_weights": found.bitwise_equal,
        "differing_steps": differing_steps(RunDir(found.run), reference), "layout": found.layout,
        "outcomes": [asdict(o) for o in found.outcomes],
    }  # fmt: skip


def page(about: dict[str, str], rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Recovery on a GPU", "",
        "Made by `python bench/gpu_recovery.py`: seconds from a fault to the next committed step, and the run compared "
        "with one without faults, bit by bit. Two ranks share the GPU over NCCL unless the name says otherwise.", "",
        *(f"- {key}: {value}" for key, value in about.items()), "",
        "| faults | ranks | recovered | median | worst | steps lost | steps that differ | weights |",
        "|---|---:|---:|---:|---:|---:|---|---|",
    ]  # fmt: skip
    for r in rows:
        if not r.get("kinds"):
            lines.append(f"| {r['name']}: {r['faults']} | {r['ranks']} | none |  |  |  |  |  |")
            continue
        differ = r["differing_steps"]
        span = f"{len(differ)}, from {differ[0]}" if differ else "none"
        weights = {True: "same", False: "differ", None: "–"}[r["same_weights"]]
        for kind, k in r["kinds"].items():
            seconds = " | ".join(f"{k[x]:.1f} s" if k[x] is not None else "–" for x in ("median_s", "worst_s"))
            lines.append(
                f"| {r['name']}: {kind} | {r['ranks']} | {k['recovered']} of {k['injected']} | {seconds} | "
                f"{k['steps_lost']} | {span} | {weights} |"
            )
    lines += ["", *(f"- {r['name']}: {r['why']}" for r in rows if r.get("why"))]
    lines += [
        f"- two runs without faults: {'same' if r['deterministic'] else 'differ'}" for r in rows if "deterministic" in r
    ]
    lines += [
        f"- {r['one_rank']['steps']} steps of {r['ranks']} ranks against one rank: largest relative difference of the "
        f"loss {r['one_rank']['loss']:.1e}, of the gradient norm {r['one_rank']['grad_norm']:.1e}"
        for r in rows if "one_rank" in r
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = make_parser(__doc__, "gpu-recovery")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--others", type=int, default=3, help="faults of each other kind")
    parser.add_argument("--steps-after", type=int, default=25, help="steps that follow each fault")
    parser.add_argument("--only", default="", help="names of groups, separated by commas")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no group is started")
    parser.add_argument("--no-control", action="store_true", help="without the second run without faults")
    parser.add_argument(
        "--compare", type=int, default=0, metavar="STEPS", help="only compare two ranks with one rank, without faults"
    )
    parser.add_argument(
        "--one-rank", action="store_true", help="compare the undisturbed kill group with one rank alone"
    )
    asked = parse(parser)
    if asked.compare:
        with tempfile.TemporaryDirectory(prefix="weft-recovery-") as folder:
            job = job_for("compare", asked.compare, Path(folder), asked, "train.microbatch=8", "model.layers=2")
            print(facts(asked), against_one_rank(job, undisturbed(job, 2, Path(folder), print), Path(folder)))
        return 0
    few = asked.others
    groups: list[tuple[Any, ...]] = [
        ("kill", 2, f"kill:{asked.kills}"), *((kind, 2, f"{kind}:{few}") for kind in ("stop", "sleep", "illegal")),
        ("one-rank", 1, f"kill:{few}"), ("gloo", 2, f"kill:{few}", "comm.backend=gloo", "cluster.share_devices=false"),
        ("four-ranks", 4, f"kill:{few}"),
    ]  # fmt: skip
    if asked.device == "cpu":
        groups = [g for g in groups if g[0] != "gloo"]
    deadline, rows = time.monotonic() + asked.budget, []
    about = facts(asked)
    with tempfile.TemporaryDirectory(prefix="weft-recovery-") as folder:
        for name, ranks, faults, *overrides in groups:
            if asked.only and name not in asked.only.split(","):
                continue
            if time.monotonic() > deadline:
                rows.append({"name": name, "ranks": ranks, "faults": faults, "why": "not started: no time left"})
                continue
            rows.append(group(name, ranks, faults, asked, Path(folder), *overrides))
            write_results(asked.to, "gpu-recovery", page(about, rows), {"about": about, "rows": rows})
    print(page(about, rows))
    return 0 if all(r.get("same_weights") and not r["differing_steps"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
