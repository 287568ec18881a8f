"""Experts on the default corpus: load balance, and validation loss compared with a dense model of the same cost.

    python bench/experts.py [--only "balance aux"] [--seed 0]

Trains moe-tiny (8 experts, 2 a token) with each kind of balance, and the dense `tiny`, whose feed-forward part has as
many weights as a token of moe-tiny uses; same tokens, same recipe, one CPU thread. Writes bench/experts.md, and keeps
what it found in bench/experts/, so that a part may be measured again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from weft.data.loader import Loader, val_batches
from weft.data.open_dataset import open_dataset
from weft.job import parse_job
from weft.mesh import connect
from weft.planner import make_plan
from weft.planner.model.counts import count_parameters
from weft.training.build import build_state
from weft.training.step import Stepper

HERE = Path(__file__).parent
WINDOW = 10
"""Steps over which the load is averaged."""
EVEN = 1.3
REMARKS = (
    "", "\\* measured by an earlier form of this script, with the same job; not run again since.", "",
    "One seed each, on a busy machine (which changes times, not losses). moe-tiny's router, scale and bias rate were "
    "chosen after looking at runs of this seed: six settings with experts were tried. With experts twice as wide, "
    "softmax, scale 1 and the usual bias rate of 0.001, the load was below 1.3 only from step 261, and the loss was "
    "2.0353 by bias, 1.9793 by aux and 2.0455 by none: there the bias was worse than aux. At 307,200 tokens the dense "
    "model is ahead of every one of these with experts. Rows that are missing have not been measured.",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A model and its number of steps."""

    name: str
    model: dict[str, Any]
    steps: int
    batch: int


EXPERTS = {balance: {"shape": "moe-tiny", "experts": {"balance": balance}} for balance in ("none", "aux", "bias")}
VARIANTS = (
    *(Variant(f"experts, balance {balance}", model, 300, 8) for balance, model in EXPERTS.items()),
    *(
        Variant(
            f"experts, softmax, balance {b}",
            {"shape": "moe-tiny", "experts": {"router": "softmax", "balance": b}},
            300,
            8,
        )
        for b in ("aux", "bias")
    ),
    Variant("dense, short", {"shape": "tiny"}, 300, 8),
    Variant("experts, longer", EXPERTS["bias"], 500, 16),
    Variant("dense, longer", {"shape": "tiny"}, 500, 16),
)


def measure(v: Variant, seed: int) -> dict[str, Any]:
    """One run's validation loss, load and size."""
    raw = {
        "model": v.model, "cluster": {"device": "cpu"}, "optim": {"lr": 2e-3},
        "train": {"steps": v.steps, "global_batch": v.batch, "seed": seed},
    }  # fmt: skip
    job, plan = make_plan(parse_job(raw), 1)
    mesh = connect(plan)
    stepper, dataset = Stepper(job, plan, mesh, build_state(job, plan, mesh)), open_dataset(job)
    load = stepper.state.model.load
    assert load is not None
    by_step = []
    share: dict[str, Any] = {"global_batch": v.batch, "microbatch": plan.microbatch, "dp_rank": 0, "dp_size": 1}
    for _, batches in zip(range(v.steps), Loader(dataset, seed=seed, prefetch=0, **share), strict=False):
        stepper.update(stepper.gradients(batches), stepper.learning_rate())
        by_step.append(load.figures()[:, :-3].tolist())
    counts = count_parameters(job.model)
    assert counts is not None
    val_loss = stepper.evaluate(list(val_batches(dataset, limit=512 // v.batch, **share)))
    found = {"val_loss": val_loss, "active": counts.active, "total": counts.total, "seed": seed}
    if by_step[0]:
        uneven = [_uneven(by_step[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(by_step))]
        even = [i for i, x in enumerate(uneven) if i >= WINDOW - 1 and x < EVEN]
        found |= {"first": uneven[WINDOW - 1], "last": uneven[-1], "even_from": even[0] + 1 if even else None}
    return found


def _uneven(window: list[list[list[float]]]) -> float:
    """Largest over mean load of the worst block, over some steps."""
    blocks = [[sum(n) for n in zip(*block, strict=True)] for block in zip(*window, strict=True)]
    return max(max(block) / mean(block) for block in blocks)


def page() -> str:
    """All results as a table."""
    lines = [
        "# Experts on the default corpus", "",
        "`python bench/experts.py`: pydoc, one CPU thread, fp32, peak rate 2e-3. Load is the fullest expert's over the "
        f"mean, in the worst block, over {WINDOW} steps; validation loss is that of 512 held-out sequences.", "",
        "| model | tokens | active parameters | all | validation loss | load first | last | below 1.3 from step |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for v in VARIANTS:
        if (kept := _kept(v)).exists():
            r = json.loads(kept.read_text(encoding="utf-8"))
            load = [f"{r['first']:.2f}", f"{r['last']:.2f}", str(r["even_from"])] if "first" in r else ["", "", ""]
            sizes = f"{v.steps} × {v.batch} × 128 | {r['active']:,} | {r['total']:,}"
            mark = " *" if "note" in r else ""
            lines.append(f"| {v.name}{mark} | {sizes} | {r['val_loss']:.4f} | {' | '.join(load)} |")
    return "\n".join([*lines, *REMARKS]) + "\n"


def _kept(v: Variant) -> Path:
    return HERE / "experts" / f"{v.name.replace(', ', '-').replace(' ', '-')}.json"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (HERE / "experts").mkdir(exist_ok=True)
    for v in VARIANTS:
        if args.only in v.name:
            _kept(v).write_text(json.dumps(measure(v, args.seed)) + "\n", encoding="utf-8")
    (HERE / "experts.md").write_text(page(), encoding="utf-8")
    print(page())


if __name__ == "__main__":
    main()
