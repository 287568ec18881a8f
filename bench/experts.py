"""Experts on the default corpus: is their load even, and do they beat the dense model that costs as much?

    python bench/experts.py [--steps 300] [--seeds 0 1] [--only "balance bias"]

Trains moe-tiny (8 experts, 2 a token) with each kind of balance, and the dense `tiny`, whose feed-forward part has as
many weights as a token of moe-tiny uses; same tokens, same recipe, one CPU rank. Writes bench/experts.md, and keeps
what it found in bench/experts.json, so that a part may be measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from weft.data.dataset import open_dataset
from weft.data.loader import Loader, val_batches
from weft.job import parse_job
from weft.mesh import connect
from weft.plan import make_plan
from weft.plan.counts import count_parameters
from weft.train.session import build_state
from weft.train.step import Stepper

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"shape": "tiny"},
    "experts, balance none": {"shape": "moe-tiny", "experts": {"balance": "none"}},
    "experts, balance aux": {"shape": "moe-tiny", "experts": {"balance": "aux"}},
    "experts, balance bias": {"shape": "moe-tiny", "experts": {"balance": "bias"}},
}
WINDOW = 10
"""Steps over which the load is averaged."""
EVEN = 1.3


def measure(model: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """One run's validation loss, load and size."""
    raw = {
        "model": model, "cluster": {"device": "cpu"}, "optim": {"lr": 2e-3},
        "train": {"steps": steps, "global_batch": 8, "seed": seed},
    }  # fmt: skip
    job, plan = make_plan(parse_job(raw), 1)
    mesh = connect(plan)
    stepper, dataset = Stepper(job, plan, mesh, build_state(job, plan, mesh)), open_dataset(job)
    load = stepper.state.woven.load
    assert load is not None
    by_step = []
    loader = Loader(dataset, seed=seed, global_batch=8, microbatch=plan.microbatch, dp_rank=0, dp_size=1, prefetch=0)
    for _, batches in zip(range(steps), loader, strict=False):
        stepper.update(stepper.gradients(batches), stepper.learning_rate())
        by_step.append(load.figures()[:, :-3].tolist())
    held_out = val_batches(dataset, global_batch=8, microbatch=plan.microbatch, dp_rank=0, dp_size=1, limit=64)
    counts = count_parameters(job.model)
    assert counts is not None
    found = {"val_loss": stepper.evaluate(list(held_out)), "active": counts.active, "total": counts.total}
    if by_step[0]:
        uneven = [_uneven(by_step[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(by_step))]
        found |= {"max_over_mean": uneven[-1], "first": uneven[WINDOW - 1]}
        even = [i for i, x in enumerate(uneven) if i >= WINDOW - 1 and x < EVEN]
        found["even_from"] = even[0] + 1 if even else None
    return found


def _uneven(window: list[list[list[float]]]) -> float:
    """Largest over mean load of the worst block, over some steps together."""
    blocks = [[sum(n) for n in zip(*block, strict=True)] for block in zip(*window, strict=True)]
    return max(max(block) / mean(block) for block in blocks)


def page(found: dict[str, list[dict[str, Any]]], steps: int, command: str) -> str:
    """The figures as a table."""
    tokens = steps * 8 * 128
    lines = [
        "# Experts on the default corpus", "",
        f"`{command}`: {steps} steps of 8 × 128 tokens of pydoc ({tokens:,} tokens), one CPU rank, fp32; "
        f"{len(next(iter(found.values())))} seeds. Load is that of the worst block over {WINDOW} steps.", "",
        "| model | active parameters | all | validation loss | max/mean load first | last | below 1.3 from step |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, runs in found.items():
        one = runs[0]
        load = ["", "", ""]
        if "first" in one:
            ends = " ".join(f"{r['max_over_mean']:.2f}" for r in runs)
            load = [" ".join(f"{r['first']:.2f}" for r in runs), ends, " ".join(str(r["even_from"]) for r in runs)]
        losses = " ".join(f"{r['val_loss']:.4f}" for r in runs)
        lines.append(f"| {name} | {one['active']:,} | {one['total']:,} | {losses} | {' | '.join(load)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    args = parser.parse_args()
    kept = Path(__file__).with_suffix(".json")
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for name, model in VARIANTS.items():
        if args.only in name:
            found[name] = [measure(model, args.steps, s) for s in args.seeds]
            kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    seeds = "" if args.seeds == [0] else " --seeds " + " ".join(map(str, args.seeds))
    ordered = {name: found[name] for name in VARIANTS if name in found}
    text = page(ordered, args.steps, f"python bench/experts.py --steps {args.steps}{seeds}")
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
