"""Fit the calibrations of weft/hardware/calibrations from tables of published runs, and report held-out errors.

    python bench/fit_planner.py RUNS.csv bench/published_others.csv            # fit, write the JSON files
    python bench/fit_planner.py RUNS.csv bench/published_others.csv --held-out # fit on some models, report on others

Held out means by model: every model of a stack is predicted once by a fit that never saw a row of it (a stack with one
model is split by its layouts' pipeline degree instead). Few numbers are fitted for each stack; which ones stands below.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from weft.extensions.published.fitting import fit, profile
from weft.extensions.published.framework import Framework, calibration_of, device_name, framework_of
from weft.extensions.published.row_arrays import estimate_rows
from weft.extensions.published.rows import PublishedRun, read_table
from weft.extensions.published.score import must_recompute, with_full_recompute
from weft.planner.calibration import CALIBRATION_FOLDER, Calibration, load_calibration

MATMUL = ("matmul", "wave", "depth")
LINKS = ("link", "network", "latency", "jitter")
HOST = ("host_us", "step_ms")
MODERN = (*MATMUL, "attention", "traffic", *HOST, *LINKS, "overlap_dp", "overlap_pp", "optimizer")


@dataclass(frozen=True)
class Recipe:
    """How one stack is fitted: where it starts, what is free, and what differs by device or kernel."""

    start: Calibration
    free: tuple[str, ...]
    variants: dict[str, tuple[dict[str, float], tuple[str, ...]]] = field(default_factory=dict)
    """Key of a variant → what is set in it, and what is fitted again on its rows alone."""
    main: Callable[[PublishedRun], bool] = lambda row: True
    """The rows the base is fitted on; all others belong to variants."""
    weight: Callable[[PublishedRun], int] = lambda row: 1
    group: Callable[[PublishedRun], str] = lambda row: row.model_name
    """What is held out together."""
    profiled: bool = False
    """Whether measured block times of the rows' shapes join the formulas."""


_old = Calibration(
    fused=0,
    host_us=950,
    host_blend=2.3,
    score_batch=4,
    traffic=1.0,
    wave=0.05,
    depth=30,
    reduce_bytes=2,
    overlap_dp=0.6,
    overlap_pp=0.5,
    network=0.5,
    latency=4.4,
    link=0.85,
    step_ms=5,
    optimizer=0.6,
    matmul=0.96,
)
_nvidia = Calibration(host_us=60, experts=0.85, low_precision=0.85, step_ms=20, traffic=2.0, host_moe_us=100)
_UNFUSED: dict[str, float] = {"fused": 0}
_FIXED_SHAPES: dict[str, float] = {"host_moe_us": 5.0}
"""Experts whose shapes do not depend on the routing: the host waits for nothing, or replays a graph."""
_GRAPHS = r"^(26\.(0[6-9]|1)|2[7-9]\.)"
"""Releases that run experts in CUDA graphs: 26.06 and later."""
POOLED = ("matmul", "attention", "traffic", "host_us", "overlap_dp", "link", "network")
POOLED_ROWS = 24
"""Rows of each source that the default is fitted on, at most about."""


def _like_bridge() -> Calibration:
    """Where the fit of MLPerf begins: it is the same software as Megatron-Bridge, with fewer models."""
    fitted = load_calibration("megatron-bridge")
    return _nvidia.with_(**{name: getattr(fitted, name) for name in (*MODERN, "low_precision", "overlap_tp")})


def _pooled() -> dict[str, float]:
    """What the default calibration has for devices of the A100's generation, from many stacks."""
    return {name: getattr(load_calibration("default"), name) for name in POOLED}


RECIPES: dict[str, Recipe] = {
    "default": Recipe(
        Calibration(host_us=200),
        POOLED,
        {f"gpu:{letter}": ({name: getattr(Calibration(), name) for name in POOLED}, ()) for letter in "hgb"},
        group=lambda row: row.source,
    ),
    "megatron-deepspeed": Recipe(
        _old.with_(head_whole=0.5),
        (
            *MATMUL,
            "traffic",
            *HOST,
            *LINKS,
            "overlap_dp",
            "overlap_pp",
            "optimizer",
            "host_blend",
            "head_whole",
            "host_backward",
        ),
        weight=lambda row: 4 if row.cluster.world > 8 else 1,
        profiled=True,
    ),
    "megatron-deepspeed-2022": Recipe(
        _old.with_(score_batch=0),
        (*MATMUL, "odd", "traffic", *HOST, *LINKS, "overlap_dp", "overlap_pp"),
        {"gpu:v100": ({}, ("matmul",))},
        main=lambda row: not row.text["gpu"].startswith("V100"),
    ),
    "aleph-alpha": Recipe(
        Calibration(traffic=2, host_us=300, head_again=1),
        MODERN,
        {
            "kernel:flash_attention2": ({}, ("traffic", "attention")),
            "kernel:flash_attentionv1.0.8": ({}, ("traffic", "attention")),
            "kernel:torch": (_UNFUSED, ("traffic",)),
            "kernel:fused": (_UNFUSED, ("traffic",)),
        },
        main=lambda row: "RMS" in row.kernel,
    ),
    "nemo": Recipe(_nvidia, (*MODERN, "low_precision", "overlap_cp", "experts", "host_moe_us")),
    "megatron-bridge": Recipe(
        _nvidia,
        (*MODERN, "low_precision", "overlap_tp", "overlap_cp", "overlap_ep", "experts", "host_moe_us"),
        {
            "gpu:gb300": ({}, ("matmul", "traffic")),
            "gpu:b": ({}, ("matmul", "host_moe_us")),
            "gpu:h100": ({}, ("matmul", "traffic", "host_moe_us", "attention")),
            "notes:token-drop": (_FIXED_SHAPES, ()),
            rf"table:{_GRAPHS}": ({**_FIXED_SHAPES, "grouped": 1}, ("experts", "overlap_ep")),
        },
        main=lambda row: (
            row.text["gpu"].startswith("GB200")
            and not (row.model.experts and re.search(_GRAPHS, row.text["table"]))
            and "token-drop" not in row.text["notes"]
        ),
    ),
    "mlperf": Recipe(
        _like_bridge(),
        (
            "matmul",
            "depth",
            "low_precision",
            "attention",
            "traffic",
            "overlap_dp",
            "overlap_tp",
            "overlap_pp",
            "overlap_cp",
            "network",
            "step_ms",
        ),
        {"gpu:h": ({}, ("matmul", "low_precision")), "gpu:gb300": ({}, ("low_precision",))},
        main=lambda row: row.text["gpu"].startswith(("B", "GB200")),
    ),
    "mosaicml": Recipe(
        Calibration(host_us=300),
        (*MATMUL, "attention", "traffic", *HOST, *LINKS, "overlap_dp", "optimizer", "host_blend"),
        {"gpu:h100": ({}, ("matmul", "attention", "traffic", "low_precision", "host_us"))},
        main=lambda row: row.text["gpu"].startswith("A100"),
    ),
    "megatron-core": Recipe(
        Calibration(overlap_dp=0.01, host_us=100),
        (*MATMUL, "attention", "traffic", *HOST, "link", "latency", "optimizer", "experts", "overlap_cp"),
    ),
    "megatron": Recipe(_old.with_(host_us=200, traffic=2.0, score_batch=0), ("matmul", "traffic", "step_ms")),
    "fsdp": Recipe(
        Calibration(
            host_us=150, overlap_dp=0.85, selective=0.5, selective_products=0.5, attention=0.4, host_moe_us=5, grouped=1
        ),
        ("matmul", "attention", "traffic", "overlap_dp", "overlap_cp", "network", "low_precision"),
        {"gpu:a": (_pooled(), ("matmul",)), "notes:eager": ({}, ("traffic",))},
        main=lambda row: not device_name(row).startswith("a") and "eager" not in row.text.get("notes", ""),
    ),
}


def fit_stack(recipe: Recipe, rows: Sequence[PublishedRun], name: str) -> Framework:
    """Base first, then each variant from the base."""
    main = [row for row in rows if recipe.main(row) for _ in range(recipe.weight(row))]
    base = fit(main or rows, recipe.start, recipe.free).with_(name=name)
    if recipe.profiled:
        base = profile([row for row in main if row.cluster.world <= row.cluster.node_size], base)
    variants: dict[str, dict[str, float]] = {}
    for key, (fixed, free) in recipe.variants.items():
        bare = Framework(name, base, {key: fixed})
        own = [row for row in rows if not recipe.main(row) and last_variant(row, recipe) == key]
        if own and free:
            found = fit(own, base.with_(**fixed), free)
            variants[key] = {**bare.variants[key], **{n: getattr(found, n) for n in free}}
        else:
            variants[key] = fixed
    return Framework(name, base, variants)


def last_variant(row: PublishedRun, recipe: Recipe) -> str:
    """The variant that a row is fitted with: the last that applies to it."""
    keys = list(recipe.variants)
    marked = Framework("", recipe.start, {key: {"jitter": -1.0 - i} for i, key in enumerate(keys)})
    return (["", *keys])[int(max(0.0, -marked.of(row).jitter))]


def errors(stack: Framework, rows: Sequence[PublishedRun]) -> np.ndarray:
    """Predicted over measured, less one."""
    out = np.zeros(len(rows))
    cals: dict[Calibration, list[int]] = {}
    for i, row in enumerate(rows):
        cals.setdefault(stack.of(row), []).append(i)
    for cal, index in cals.items():
        output = estimate_rows([rows[i] for i in index], cal).step_time_s
        out[index] = output / np.array([rows[i].seconds for i in index]) - 1
    return out


def groups(recipe: Recipe, rows: Sequence[PublishedRun]) -> list[str]:
    names = [recipe.group(row) for row in rows]
    return names if len(set(names)) > 1 else [f"pp {row.layout['pp']}" for row in rows]


def held_out(recipe: Recipe, rows: Sequence[PublishedRun], name: str) -> np.ndarray:
    """Errors of every row by fits without its group; groups are dealt into at most five folds, the largest first."""
    keys = groups(recipe, rows)
    sizes = sorted(set(keys), key=lambda k: (-keys.count(k), k))
    folds = {key: i % 5 for i, key in enumerate(sizes)}
    out = np.full(len(rows), np.nan)
    for fold in sorted(set(folds.values())):
        inside = [i for i, key in enumerate(keys) if folds[key] == fold]
        outside = [row for row, key in zip(rows, keys, strict=True) if folds[key] != fold]
        if outside:
            out[inside] = errors(fit_stack(recipe, outside, name), [rows[i] for i in inside])
    return out


def show(name: str, e: np.ndarray) -> dict[str, float]:
    size = np.abs(e[~np.isnan(e)])
    output = {"rows": len(size), "median": np.median(size), "mean": size.mean(), "p90": np.quantile(size, 0.9)}
    print(
        f"{name:28} {output['rows']:5.0f} rows  "
        f"median {output['median']:.3f}  mean {output['mean']:.3f}  p90 {output['p90']:.3f}",
        flush=True,
    )
    return {k: round(float(v), 4) for k, v in output.items()}


def rows_of(paths: Sequence[Path]) -> dict[str, list[PublishedRun]]:
    """Rows with a time, by stack. Some FSDP runs are few and of trust B: they calibrate, unscored. The default
    is fitted on some rows of every source with devices of the A100's generation, but not on blocks timed alone."""
    out: dict[str, list[PublishedRun]] = {}
    for row in [row for path in paths for row in read_table(path)[0]]:
        if row.seconds:
            out.setdefault(framework_of(row), []).append(row)
        elif (
            row.why_not == "trust B"
            and framework_of(row) == "fsdp"
            and row.text["task"] == "pretrain"
            and row.text["tokens_per_s_per_gpu"]
        ):
            tokens = float(row.text["tokens_per_s_per_gpu"]) * row.cluster.world
            again = replace(row, seconds=row.global_batch * row.model.seq_len / tokens)
            [peak] = estimate_rows([again], calibration_of(again)).peak_gib
            out.setdefault("fsdp", []).append(with_full_recompute(again) if must_recompute(again, peak) else again)
    sources: dict[str, list[PublishedRun]] = {}
    for row in [row for name, rows in out.items() if name != "megatron-deepspeed" for row in rows]:
        if device_name(row).startswith("a"):
            sources.setdefault(row.source, []).append(row)
    return out | {"default": [row for own in sources.values() for row in own[:: max(1, len(own) // POOLED_ROWS)]]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only")
    args = parser.parse_args()
    output: dict[str, dict[str, float]] = {}
    every = []
    for name, rows in rows_of(args.tables).items():
        if name not in RECIPES or (args.only and name not in args.only.split(",")):
            continue
        recipe = with_memory(RECIPES[name], name)
        if args.held_out:
            e = held_out(recipe, rows, name)
            output[name] = show(name, e)
            every += [e] if name != "default" else []  # its rows are those of other stacks
            continue
        stack = fit_stack(recipe, rows, name)
        e = errors(stack, rows)
        show(name, e)
        every.append(e)
        write(stack, float(np.quantile(np.abs(e), 0.9)), recipe, len(rows))
    default = output.pop("default", None)
    output["all"] = show("all", np.concatenate([*every, np.array([])]))
    if args.held_out and not args.only and default:
        output["default, without the source"] = default
        Path(__file__).with_name("planner_held_out.json").write_text(
            json.dumps(output, indent=2) + "\n", encoding="utf-8"
        )


def with_memory(recipe: Recipe, name: str) -> Recipe:
    """The recipe with the memory settings of the stack's file, as some of them take time too (logits_whole)."""
    path = CALIBRATION_FOLDER / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return replace(recipe, start=recipe.start.with_(**{k: v for k, v in before.items() if k in MEMORY}))


def write(stack: Framework, spread: float, recipe: Recipe, rows: int) -> None:
    """Only what differs from the defaults; memory settings that are already in the file stay."""
    path = CALIBRATION_FOLDER / f"{stack.name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = {k: v for k, v in before.items() if k in MEMORY}
    plain = Calibration()
    own = {
        k: v for k, v in stack.base.__dict__.items() if v != getattr(plain, k) and k not in (*MEMORY, "name", "spread")
    }
    variants = {k: {n: v for n, v in change.items() if n in MEMORY} for k, change in before.get("variants", {}).items()}
    variants = {k: {**variants.get(k, {}), **stack.variants.get(k, {})} for k in (*stack.variants, *variants)}
    variants = {k: change for k, change in variants.items() if change}
    output = {
        "name": stack.name,
        "fitted": {"rows": rows, "free": list(recipe.free)},
        **own,
        **kept,
        "spread": round(max(0.05, spread), 3),
        **({"variants": variants} if variants else {}),
    }
    path.write_text(json.dumps(output, indent=2) + "\n", encoding="utf-8")


MEMORY = (
    "parameter_bytes",
    "gradient_bytes",
    "master_bytes",
    "moment_bytes",
    "activation",
    "logits",
    "logits_whole",
    "loss_chunk",
    "context_gib",
    "fragment",
    "usable",
    "stream",
    "gather_limit",
    "loads_whole",
    "host_checkpoints",
    "experts_over_tp",
    "gathered_inputs",
    "accumulates_whole",
)

if __name__ == "__main__":
    main()
