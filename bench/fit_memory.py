"""Fit the memory numbers of the calibrations: from published peaks, and from which layouts ran out of memory.

    python bench/fit_memory.py RUNS.csv             # fit, write into the JSON files
    python bench/fit_memory.py RUNS.csv --held-out  # fit without each model, judge that model

A random search over a few numbers for each stack. A peak counts by its error in logarithms; a run that is only known to
fit, or not to, counts by how far on the wrong side of the device's memory it is put. A false "fits" counts twice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.planner.calibration import CALIBRATION_FOLDER, Calibration
from weft.planner.memory.framework_memory import GIB, framework_memory
from weft.planner.published.framework import PURE_BF16, Framework, framework_of, load_framework
from weft.planner.published.row_arrays import gather_rows
from weft.planner.published.rows import PublishedRun, read_table

SHARPNESS = 25.0
"""How steeply the cost of a wrong verdict rises with its distance from the limit."""
USUAL = {"activation": (0.5, 4.0), "logits": (2.0, 24.0), "context_gib": (0.5, 8.0), "fragment": (0.0, 0.15)}
# what is free in each stack's base, and the factor on activations of each variant
FREE: dict[str, dict[str, tuple[float, float]]] = {
    "aleph-alpha": {**USUAL, "logits_whole": (0.0, 40.0)},
    "megatron-deepspeed-2022": {**USUAL, "gradient_bytes": (2.0, 6.0)},
    "megatron": {**USUAL, "gradient_bytes": (2.0, 6.0)},
    "megatron-core": {"activation": (0.5, 2.0), "logits": (2.0, 16.0), "context_gib": (0.0, 1.0)},
    "fsdp": {**USUAL},
}
FIXED: dict[str, dict[str, float]] = {
    "aleph-alpha": {"gradient_bytes": 2.0, "usable": 1.03},
    "megatron-core": {"fragment": 0.0},
}
FACTORS = {
    "aleph-alpha": {
        "kernel:flash_attention2": 1.5,
        "kernel:flash_attentionv1.0.8": 1.5,
        "kernel:fused": 1.5,
        "kernel:torch": 1.2,
    }
}


def loss(stack: Framework, rows: Sequence[PublishedRun]) -> tuple[float, int, int]:
    """The cost, and the wrong predictions: that a layout fits, and that it does not."""
    by: dict[Calibration, list[PublishedRun]] = {}
    for row in rows:
        cal = stack.of(row)
        cal = cal.with_(**PURE_BF16) if "bf16-true" in row.text.get("precision", "") else cal
        by.setdefault(cal, []).append(row)
    total, fits, fails = 0.0, 0, 0
    for cal, own in by.items():
        if own[0].row_id not in CACHE:
            CACHE[own[0].row_id] = gather_rows(own)
        model, cluster, layouts, _ = CACHE[own[0].row_id]
        peak = sum(framework_memory(model, layouts, cal).values()) / GIB
        over = np.log(peak / (cluster.memory_gib * cal.usable))
        known = np.array([row.memory_gib or 0.0 for row in own])
        ran = np.array([bool(row.fitted) for row in own])
        verdict = np.where(ran, 1, 2) * np.log1p(np.exp(SHARPNESS * over * np.where(ran, 1, -1))) / SHARPNESS
        off = np.abs(np.log(peak / np.maximum(known, 1e-9)))
        total += float(np.where(known > 0, np.minimum(off, 0.5), verdict).sum())
        fits += int(((over <= 0) & ~ran).sum())
        fails += int(((over > 0) & ran).sum())
    return total, fits, fails


CACHE: dict[str, tuple] = {}  # type: ignore[type-arg]


def search(name: str, rows: Sequence[PublishedRun], tries: int) -> Framework:
    """Widely at first, then around the best."""
    start, free = load_framework(name), FREE[name]
    factors = FACTORS.get(name, {})
    names, keys = list(free), list(factors)
    low = np.array([free[n][0] for n in names] + [0.5 * factors[k] for k in keys])
    high = np.array([free[n][1] for n in names] + [2.0 * factors[k] for k in keys])
    rng = np.random.default_rng(0)
    best_value, best, found = np.inf, (low + high) / 2, start
    for number in range(tries):
        wide = number < tries // 5
        point = (
            low + (high - low) * rng.random(len(low))
            if wide
            else np.clip(best + rng.normal(size=len(low)) * (high - low) * 0.07, low, high)
        )
        told = {n: round(float(v), 3) for n, v in zip(names, point, strict=False)}
        variants = {k: dict(v) for k, v in start.variants.items()}
        for key, factor in zip(keys, point[len(names) :], strict=True):
            variants[key]["activation"] = round(told["activation"] * float(factor), 3)
        tried = Framework(name, start.base.with_(**{**told, **FIXED.get(name, {})}), variants)
        value = loss(tried, rows)[0]
        if value < best_value:
            best_value, best, found = value, point, tried
    return found


def held_out(name: str, rows: Sequence[PublishedRun], tries: int) -> None:
    """Verdicts and peaks of every model by a fit without it."""
    fits = fails = 0
    for model in sorted({row.model_name for row in rows}):
        CACHE.clear()
        found = search(name, [row for row in rows if row.model_name != model], tries)
        CACHE.clear()
        _, a, b = loss(found, [row for row in rows if row.model_name == model])
        fits, fails = fits + a, fails + b
    right = 1 - (fits + fails) / len(rows)
    print(
        f"{name:26} {len(rows):4d} rows held out  right {right:.3f}  false fits {fits}  false OOM {fails}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--tries", type=int, default=1500)
    args = parser.parse_args()
    every = [r for r in read_table(args.table)[0] if r.fitted is not None]
    for name in FREE:
        if args.only and name not in args.only.split(","):
            continue
        rows = [r for r in every if framework_of(r) == name and r.text.get("recompute") and r.text.get("trust") != "C"]
        if args.held_out:
            held_out(name, rows, args.tries)
            continue
        CACHE.clear()
        found = search(name, rows, args.tries)
        value, fits, fails = loss(found, rows)
        print(f"{name:26} {len(rows):4d} rows  cost {value:.2f}  false fits {fits}  false OOM {fails}", flush=True)
        path = CALIBRATION_FOLDER / f"{name}.json"
        told = json.loads(path.read_text(encoding="utf-8"))
        told |= {n: getattr(found.base, n) for n in (*FREE[name], *FIXED.get(name, {}))}
        if found.variants:
            told["variants"] = told.pop("variants", {}) | found.variants
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
