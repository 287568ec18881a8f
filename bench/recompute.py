"""Recompute modes on one GPU: tokens/s and peak memory of the 3B shape at 8k and at 32k tokens.

    python bench/recompute.py [--options none,selective,full,14] [--lengths 8192,32768] [--shape 3b] [--json]

Each pair is a process of its own: `weft train` on a job file, one sequence a step, ended after a few steps. An option
that does not fit in the card's memory is reported as such, which is a result too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu import PEAK, run_weft
from shapes import SHAPES, WARMUP_STEPS

NO_ROOM = ("out of memory", "outofmemory", "will not fit", " need ")


def measure(
    shape: str, length: int, word: str, steps: int, limit_s: float, precision: str, folder: Path
) -> dict[str, Any]:
    s = replace(SHAPES[shape], seq=length, batch=1)
    found = run_weft(s, precision, steps, limit_s, folder, [f"memory.recompute={word}"])
    row: dict[str, Any] = {"recompute": word, "seq_len": length}
    if "error" in found:
        result = found["error"]
        return {**row, "fits": not any(w in result.lower() for w in NO_ROOM), "error": result}
    rate = s.tokens / found["step_time_s"]
    return {
        **row, "fits": True, "tokens_per_s": rate, "mfu": rate * s.flops_per_token / PEAK,
        "step_ms": found["step_time_s"] * 1e3, "peak_gib": found["peak_gib"],
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> str:
    base = {r["seq_len"]: r["tokens_per_s"] for r in rows if r["recompute"] == "none" and "error" not in r}
    lines = [f"{'seq_len':>8} {'recompute':>10} {'tokens/s':>9} {'MFU':>7} {'peak GiB':>9} {'of none':>8}"]
    for r in rows:
        name = f"{r['seq_len']:8,} {r['recompute']:>10}"
        if "error" in r:
            lines.append(f"{name} {'does not fit' if not r['fits'] else 'failed: ' + r['error']}")
            continue
        share = f"{r['tokens_per_s'] / base[r['seq_len']]:8.1%}" if r["seq_len"] in base else "       –"
        lines.append(f"{name} {r['tokens_per_s']:9,.0f} {r['mfu']:7.1%} {r['peak_gib']:9.1f} {share}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--options", default="none,selective,14,full", help="names, or a number of blocks")
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--shape", default="3b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument(
        "--steps", type=int, default=7, help=f"of each process; the first {WARMUP_STEPS} are not counted"
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a process may take")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than the {WARMUP_STEPS} that are not counted")
    rows = []
    lengths = [int(length) for length in args.lengths.split(",")]
    with tempfile.TemporaryDirectory(prefix="weft-bench-", ignore_cleanup_errors=True) as folder:
        for length, word in itertools.product(lengths, args.options.split(",")):
            began = time.time()
            where = Path(folder) / word
            row = measure(args.shape, length, word, args.steps, args.limit, args.precision, where)
            rows.append(row)
            result = "failed" if "error" in row else f"{row['tokens_per_s']:,.0f} tokens/s"
            print(f"{length} {word}: {result} ({time.time() - began:.0f} s)", file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if args.json else show(rows))


if __name__ == "__main__":
    main()
