"""The loss that `memory.activations: fp8` costs: runs of the recipe `demo` with exact and with fp8 activations.

    python bench/activations_fp8.py [--steps 150] [--seeds 3] [--json]

Both train the same weights on the same samples on one CPU rank; the validation loss is that after the last step. The
spread between seeds says how much of the difference is chance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

OPTIONS = ("exact", "fp8")


def train(option: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """The validation loss and the predicted memory of activations of one run."""
    name = f"{option}-{seed}"
    settings = [
        f"memory.activations={option}", f"train.seed={seed}", f"train.steps={steps}", f"train.eval_every={steps}",
        f"name={name}", f"runs_dir={folder}", "parallel={dp_replicate: 1, dp_shard: 1}", "cluster.devices_per_node=1",
        "memory.recompute=none",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "weft", "train", "demo", *settings, "--nproc", "1"], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    plan = json.loads((folder / name / "plan.json").read_text(encoding="utf-8"))
    return {"val_loss": losses[-1], "activations_gib": plan["predicted"]["activations_gib"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            found = {option: train(option, seed, args.steps, Path(folder)) for option in OPTIONS}
            rows.append({"seed": seed, **{o: found[o]["val_loss"] for o in OPTIONS}})
            memory = {o: found[o]["activations_gib"] for o in OPTIONS}
    if args.json:
        print(json.dumps({"steps": args.steps, "rows": rows, "activations_gib": memory}, indent=2))
        return
    print(f"validation loss after {args.steps} steps of demo\n{'seed':>6}{'exact':>10}{'fp8':>10}{'change':>10}")
    for row in rows:
        print(f"{row['seed']:6}{row['exact']:10.4f}{row['fp8']:10.4f}{row['fp8'] / row['exact'] - 1:+10.2%}")
    exact, coded = (mean(row[option] for row in rows) for option in OPTIONS)
    print(f"{'mean':>6}{exact:10.4f}{coded:10.4f}{coded / exact - 1:+10.2%}")
    print(f"predicted memory of activations: {memory['exact']:.3f} GiB exact, {memory['fp8']:.3f} GiB in fp8")


if __name__ == "__main__":
    main()
