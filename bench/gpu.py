"""Weft and other trainers on one GPU: tokens/s, MFU, peak memory and the ratio to torchtitan with compile.

    PEERS_SITE=folder python bench/gpu.py [--cases weft,bare-loop] [--shapes 1b,3b] [--rounds 2] [--json] [KEY=VALUE …]

Each case is a process of its own, and the cases take turns, so that a change in the card's clocks meets all of them.
Weft is `weft train` on a job file, and its figures are those of its metrics.jsonl. The peers are in bench/peers.py;
torchtitan comes from PEERS_SITE (pip install --target, --no-deps: torchtitan 0.2.2, torchdata, torchao,
tyro, and what tyro needs).

MFU is by one formula for all: six FLOPs a token for each multiplied weight, causal attention counted once, over the
H200's 989 TFLOP/s in bf16, also for the fp8 cases. "First step" is the time from the start of the process to the end
of its first step; Weft's is when metrics.jsonl shows it, which is one step later. The second of two rounds is a warm
start.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from peers import CASES
from shapes import SHAPES, WARMUP_STEPS, Shape

ROOT = Path(__file__).resolve().parent.parent
PEAK = 989e12
REFERENCE = "torchtitan-compile"
WEFT: dict[str, tuple[str, list[str]]] = {
    "weft": ("bf16", []),
    "weft-documents": ("bf16", ["data.source=pydoc", "data.mask_documents=true"]),
    "weft-fp8": ("fp8", []),
    "weft-fp8-no-head": ("fp8", ["fp8.head=false"]),
    "weft-fp8-dynamic": ("fp8", ["fp8.amax=dynamic", "fp8.head=false"]),
}
"""Precision and overrides of the job."""
ORDER = ("weft", "torchtitan-compile", "weft-fp8", "weft-fp8-no-head", "weft-fp8-dynamic",
         "weft-documents", "torchtitan-compile-fp8", "bare-loop", "torchtitan-eager", "hf-accelerate-compile",
         "hf-accelerate-eager")  # fmt: skip
AIMS = {"weft": 1.12, "weft-fp8": 1.55}
"""Target ratio to the tokens/s of torchtitan with compile in bf16."""


def weft_job(s: Shape, precision: str, folder: str = "runs") -> dict[str, Any]:
    """The same model, batch and recipe, as a job. It never reaches its last step, so it writes no checkpoint."""
    return {
        "name": "bench",
        "model": {
            "family": "llama", "dim": s.dim, "layers": s.layers, "heads": s.heads, "kv_heads": s.kv, "ffn": s.ffn,
            "vocab": s.vocab, "tied": False, "rope_theta": 500000.0,
        },
        "data": {"source": "synthetic", "seq_len": s.seq},
        "train": {"steps": 100_000, "global_batch": s.batch, "microbatch": s.batch, "eval_every": 0},
        "optim": {"name": "adamw", "lr": 3e-4, "clip": 1.0, "weight_decay": 0.1, "warmup": 2, "schedule": "constant"},
        "cluster": {"devices_per_node": 1},
        "precision": precision,
        "memory": {"recompute": "none"},
        "checkpoint": {"every": 0},
        "runs_dir": folder,
    }  # fmt: skip


def run_weft(
    s: Shape, precision: str, steps: int, limit_s: float, folder: Path, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """`weft train`, ended once it has recorded enough steps: a run that is killed leaves its metrics whole.

    A folder that is used again keeps the compile cache, so the first round is a cold start and later ones are warm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "job.yaml", folder / "said.txt"
    path.write_text(json.dumps(weft_job(s, precision, str(folder))), encoding="utf-8")
    metrics = folder / "bench" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env["XDG_CACHE_HOME"] = str(folder / "cache")
    began = time.time()
    first = None
    with log.open("wb") as result:
        command = [sys.executable, "-m", "weft", "train", str(path), *changes]
        process = subprocess.Popen(command, env=env, stdout=result, stderr=result, cwd=folder)
        try:
            while len(records := _records(metrics)) < steps:
                first = first or (time.time() - began if records else None)
                if process.poll() is not None or time.time() - began > limit_s:
                    return {"error": _last_lines(log)}
                time.sleep(0.05)
        finally:
            end_run(process)
    counted = records[WARMUP_STEPS:steps]
    return {
        "step_time_s": statistics.median(r["step_time_s"] for r in counted),
        "peak_gib": max(r["peak_memory_gib"] for r in counted),
        "first_step_s": first or time.time() - began,
    }


def end_run(process: subprocess.Popen[bytes]) -> None:
    """End a run and wait until its ranks have freed their memory."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        psutil.wait_procs(ranks, timeout=30)
    process.wait()


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def _last_lines(path: Path, count: int = 6) -> str:
    return " | ".join(path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:])[-1500:]


def run_peer(case: str, shape: str, steps: int, limit_s: float) -> dict[str, Any]:
    env = {**os.environ, "BENCH_BEGAN": str(time.time())}
    command = [sys.executable, str(ROOT / "bench" / "peers.py"), case, shape, str(steps)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {limit_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": " | ".join((done.stdout + done.stderr).strip().splitlines()[-6:])[-1500:]}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def figures(case: str, shape: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table: the median over the medians of a case's rounds."""
    good = [r for r in rounds if "error" not in r]
    if not good:
        return {"case": case, "shape": shape, "error": rounds[-1]["error"]}
    s, seconds = SHAPES[shape], statistics.median(r["step_time_s"] for r in good)
    rate = s.tokens / seconds
    return {
        "case": case, "shape": shape, "tokens_per_s": rate, "mfu": rate * s.flops_per_token / PEAK,
        "step_ms": seconds * 1e3, "peak_gib": max(r["peak_gib"] for r in good),
        "first_step_s": [round(r["first_step_s"], 1) for r in good], "rounds": len(good),
        "spread": max(r["step_time_s"] for r in good) / min(r["step_time_s"] for r in good) - 1,
    }  # fmt: skip


def add_ratios(rows: list[dict[str, Any]]) -> None:
    base = {r["shape"]: r["tokens_per_s"] for r in rows if r["case"] == REFERENCE and "error" not in r}
    for row in rows:
        if "error" not in row and row["shape"] in base:
            row["ratio"] = row["tokens_per_s"] / base[row["shape"]]


def show(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'':24} {'shape':>5} {'tokens/s':>9} {'MFU':>7} {'step ms':>8} {'peak GiB':>9} {'ratio':>7}  first step s"
    ]
    for r in rows:
        name = f"{r['case']:24} {r['shape']:>5}"
        if "error" in r:
            lines.append(f"{name} failed: {r['error']}")
            continue
        ratio = f"{r['ratio']:6.3f}×" if "ratio" in r else "      –"
        aim = f"  (aim {AIMS[r['case']]:.2f}×)" if r["case"] in AIMS and "ratio" in r else ""
        lines.append(
            f"{name} {r['tokens_per_s']:9,.0f} {r['mfu']:7.1%} {r['step_ms']:8.1f} {r['peak_gib']:9.1f} {ratio}  "
            f"{', '.join(str(t) for t in r['first_step_s'])}{aim}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(ORDER), help=f"of {', '.join(ORDER)}")
    parser.add_argument("--shapes", default="1b,3b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, default=14, help=f"of each process; the first {WARMUP_STEPS} are not counted"
    )
    parser.add_argument("--limit", type=float, default=170.0, help="seconds a process may take")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", choices=SHAPES, help="only print the job file of a shape, for weft bench step")
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="changes to Weft's job, such as data.prefetch=0"
    )
    args = parser.parse_args()
    if args.job:
        return print(json.dumps(weft_job(SHAPES[args.job], "bf16"), indent=1))
    cases, shapes = args.cases.split(","), args.shapes.split(",")
    for name in cases:
        if name not in WEFT and name not in CASES:
            parser.error(f"no case is named {name!r}; there are {', '.join(ORDER)}")
    for name in shapes:
        if name not in SHAPES:
            parser.error(f"no shape is named {name!r}; there are {', '.join(SHAPES)}")
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than the {WARMUP_STEPS} that are not counted")
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {(s, c): [] for s in shapes for c in cases}
    with tempfile.TemporaryDirectory(prefix="weft-bench-", ignore_cleanup_errors=True) as folder:
        for shape, turn, case in itertools.product(shapes, range(args.rounds), cases):
            began = time.time()
            if case in WEFT:
                where, (precision, changes) = Path(folder) / f"{case}-{shape}", WEFT[case]
                changes = [*changes, *args.changes]
                found = run_weft(SHAPES[shape], precision, args.steps, args.limit, where, changes)
            else:
                found = run_peer(case, shape, args.steps, args.limit)
            seen[shape, case].append(found)
            result = found.get("error") or f"{SHAPES[shape].tokens / found['step_time_s']:,.0f} tokens/s"
            took = time.time() - began
            print(f"{shape} {case} round {turn + 1}: {result} ({took:.0f} s)", file=sys.stderr, flush=True)
    rows = [figures(case, shape, rounds) for (shape, case), rounds in seen.items()]
    add_ratios(rows)
    print(json.dumps(rows, indent=1) if args.json else show(rows))


if __name__ == "__main__":
    main()
