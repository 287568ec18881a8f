"""Fit the memory numbers of the calibrations: from published peaks, and from which layouts ran out of memory.

    python bench/fit_memory.py RUNS.csv             # fit, write into the JSON files
    python bench/fit_memory.py RUNS.csv --held-out  # fit without each model, and score that model

A random search over a few numbers for each framework. A peak counts by its error in logarithms; a run that is only
known to fit, or not to, counts by how far on the wrong side of the device's memory it is predicted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from weft.extensions.published.framework import Framework, framework_of, load_framework, with_states
from weft.extensions.published.row_arrays import gather_rows
from weft.extensions.published.rows import PublishedRun, read_table
from weft.hardware.probe import GIB
from weft.planner.calibration import CALIBRATION_FOLDER, Calibration
from weft.planner.memory.framework_memory import framework_memory

VERDICT_STEEPNESS = 25.0
"""How steeply the cost of a wrong verdict rises with its distance from the limit."""
MAX_ERROR = 0.5
"""Errors of peaks beyond this cost no more."""
Bounds = tuple[float, float]
USUAL: dict[str, Bounds] = {
    "activation": (0.5, 2.5), "logits": (2.0, 24.0), "context_gib": (0.5, 5.0), "fragment": (0.0, 0.15)
}  # fmt: skip
FREE: dict[str, dict[str, Bounds]] = {
    "aleph-alpha": {**USUAL, "logits_whole": (0.0, 24.0), "stream": (2.0, 12.0), "several operators/stream": (4, 24.0)},
    "megatron-deepspeed-2022": {**USUAL, "gradient_bytes": (2.0, 6.0), "precision:bf16/gradient_bytes": (2.0, 8.0)},
    "megatron": {**USUAL, "gradient_bytes": (2.0, 6.0)},
    "megatron-core": {"activation": (0.5, 2.0), "logits": (2.0, 16.0), "context_gib": (0.0, 1.0)},
    "litgpt": {"activation": (0.8, 1.6), "stream": (2.0, 12.0), "logits": (6.0, 24.0)},
    "liger": {"activation": (0.8, 1.6), "context_gib": (0.0, 5.0)},
}
"""What is fitted of each framework: a number of its base, or `variant/number`."""
SHARED = {"several operators": ("flash_attention2", "flash_attentionv1.0.8", "torch", "fused")}
"""Kernels that share a number: RMS norms of several operators."""


def framework(start: Framework, values: dict[str, float]) -> Framework:
    """The framework with some numbers changed."""
    variants = {key: dict(change) for key, change in start.variants.items()}
    for name, value in values.items():
        variant, _, number = name.rpartition("/")
        keys = [f"kernel:{kernel}" for kernel in SHARED[variant]] if variant in SHARED else [variant] * bool(variant)
        for key in keys:
            variants.setdefault(key, {})[number] = value
    base = start.base.with_(**{name: value for name, value in values.items() if "/" not in name})
    return Framework(start.name, base, variants)


def loss(rows: Sequence[PublishedRun]) -> Callable[[Framework], tuple[float, int, int, np.ndarray]]:
    """A function of a framework: its cost, verdicts that were wrong (predicted to fit, and not to), and errors."""
    start = load_framework(framework_of(rows[0]))
    by: dict[Calibration, list[PublishedRun]] = {}
    for row in rows:
        by.setdefault(with_states(start.of(row), row), []).append(row)
    groups = [(own, gather_rows(own)) for own in by.values()]

    def cost(stack: Framework) -> tuple[float, int, int, np.ndarray]:
        total, fits, fails, errors = 0.0, 0, 0, []
        for own, (model, cluster, layouts) in groups:
            cal = with_states(stack.of(own[0]), own[0])
            peak = sum(framework_memory(model, layouts, cal).values()) / GIB
            over = np.log(peak / (cluster.memory_gib * cal.usable))
            known = np.array([row.memory_gib or 0.0 for row in own])
            ran = np.array([bool(row.fitted) for row in own])
            verdict = np.log1p(np.exp(VERDICT_STEEPNESS * over * np.where(ran, 1, -1))) / VERDICT_STEEPNESS
            off = np.abs(np.log(peak / np.maximum(known, 1e-9)))
            total += float(np.where(known > 0, np.minimum(off, MAX_ERROR), verdict).sum())
            fits += int(((over <= 0) & ~ran).sum())
            fails += int(((over > 0) & ran).sum())
            errors.append((peak / np.maximum(known, 1e-9) - 1)[(known > 0) & ran])
        return total, fits, fails, np.abs(np.concatenate(errors))

    return cost


def search(name: str, rows: Sequence[PublishedRun], tries: int) -> dict[str, float]:
    """The best values: searched widely at first, then around the best."""
    start, free, cost = load_framework(name), FREE[name], loss(rows)
    low, high = np.array(list(free.values())).T
    rng = np.random.default_rng(0)
    best_cost, best = np.inf, (low + high) / 2
    for number in range(tries):
        width = 0.15 * (1 - number / tries) + 0.01
        wide = low + (high - low) * rng.random(len(low))
        near = np.clip(best + rng.normal(size=len(low)) * (high - low) * width, low, high)
        point = wide if number < tries // 5 else near
        value = cost(framework(start, dict(zip(free, point, strict=True))))[0]
        if value < best_cost:
            best_cost, best = value, point
    return {n: round(float(v), 3) for n, v in zip(free, best, strict=True)}


def show(name: str, rows: int, fits: int, fails: int, errors: np.ndarray) -> str:
    peaks = f"  peaks {np.median(errors):.1%} median {np.quantile(errors, 0.9):.1%} p90" if len(errors) else ""
    return f"{name:26} {rows:4d} rows  false fits {fits}  false out of memory {fails}{peaks}"


def held_out(name: str, rows: Sequence[PublishedRun], tries: int) -> None:
    """Score every model by a fit without it."""
    found, start, models = [], load_framework(name), sorted({row.model_name for row in rows})
    if len(models) < 2:
        print(f"{name:26} has one model")
        return
    for model in models:
        values = search(name, [row for row in rows if row.model_name != model], tries)
        found.append(loss([row for row in rows if row.model_name == model])(framework(start, values)))
    errors = np.concatenate([each[3] for each in found])
    print(show(f"{name}, held out", len(rows), sum(f[1] for f in found), sum(f[2] for f in found), errors), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--tries", type=int, default=1500)
    args = parser.parse_args()
    every = [r for r in read_table(args.table)[0] if r.fitted is not None]
    for name in args.only.split(",") if args.only else FREE:
        rows = [r for r in every if framework_of(r) == name]
        if args.held_out:
            held_out(name, rows, args.tries)
            continue
        values = search(name, rows, args.tries)
        found = framework(load_framework(name), values)
        print(show(name, len(rows), *loss(rows)(found)[1:]), values, flush=True)
        path = CALIBRATION_FOLDER / f"{name}.json"
        contents = json.loads(path.read_text(encoding="utf-8"))
        spread = contents.pop("spread")
        contents |= {n: v for n, v in values.items() if "/" not in n} | {"spread": spread}
        if found.variants:
            contents.pop("variants", None)
            contents["variants"] = found.variants
        path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
