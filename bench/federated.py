"""Federated averaging over clients with skewed data compared with central training: validation loss at equal samples.

    python bench/federated.py --write      two jobs, three seeds, rounds of 1 and 5 steps → federated.md

Eight clients, each with other topics of a corpus or other labels of a set of images; two workers play them. Central
training takes as many steps with the same global batch, so both see as many samples.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from weft.data.open_dataset import open_dataset
from weft.extensions.server.federated_client import client_shares
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.job.shapes import resolve
from weft.watch.journal import read_jsonl

HERE = Path(__file__).resolve().parent
JOBS: dict[str, tuple[str, ...]] = {
    "tiny": ("train.global_batch=16", "train.eval_batches=32", "data.seq_len=64", "optim.lr=3e-3", "optim.warmup=0.1"),
    "vit": ("train.global_batch=64", "train.eval_batches=8"),
}
"""Text, with each stretch of the corpus as a topic, and images with labels."""


def run(folder: Path, recipe: str, name: str, steps: int, seed: int, sync: str) -> float:
    """Train once; the last validation loss."""
    command = [
        sys.executable, "-m", "weft", "train", recipe, f"name={name}", f"train.sync={sync}", f"train.steps={steps}",
        f"train.eval_every={steps}", f"train.seed={seed}", "checkpoint.every=0", "parallel=auto",
        "cluster.device=cpu", *JOBS[recipe], "--nproc", "2",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}\n{done.stderr}")
    events = read_jsonl(RunDir(folder / "runs" / name).events)
    return float([e["val_loss"] for e in events if e["event"] == "eval"][-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default="tiny,vit")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", default="1,5", help="steps of a round")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--skew", type=float, default=0.3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--sampled", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write federated.md")
    asked = parser.parse_args()
    lines = ["| job | seed | examples of the clients | central | steps of a round | federated | against central |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    print("\n".join(lines), flush=True)
    means = []
    for recipe in asked.jobs.split(","):
        found: dict[str, list[float]] = {every: [] for every in asked.every.split(",")}
        for seed in asked.seeds.split(","):
            rest = f"clients: {asked.clients}, sampled: {asked.sampled}, skew: {asked.skew}"
            with tempfile.TemporaryDirectory() as folder:
                section = f"train.sync={{mode: federated, {rest}}}"
                job = resolve(load_job(recipe, [section, f"train.seed={seed}", *JOBS[recipe]]))
                sizes = sorted(len(s) for s in client_shares(job, open_dataset(job)))
                central = run(Path(folder), recipe, "central", asked.steps, int(seed), "step")
                for every, off in found.items():
                    sync = f"{{mode: federated, every: {every}, {rest}}}"
                    loss = run(Path(folder), recipe, f"every{every}", asked.steps, int(seed), sync)
                    off.append(100 * (loss / central - 1))
                    lines.append(
                        f"| {recipe} | {seed} | {sizes[0]} to {sizes[-1]} | {central:.4f} | {every} | {loss:.4f} "
                        f"| {off[-1]:+.2f} % |"
                    )
                    print(lines[-1], flush=True)
        means += [f"{recipe}, rounds of {e}: {statistics.mean(off):+.2f} % in the mean" for e, off in found.items()]
    print("\n".join(means))
    if asked.write:
        text = (
            "# Federated training compared with central training\n\n`"
            + " ".join(["python bench/federated.py", *sys.argv[1:]])
            + f"`: {asked.clients} clients, {asked.sampled} of them in each round, skew {asked.skew:g}; {asked.steps} "
            "steps, the same global batch for both. Seeds differ in weights, order and shares: the loss of central "
            "training itself varies by a few per cent between them.\n\n"
        )
        whole = text + "\n".join(lines) + "\n\n" + "\n".join(f"- {m}" for m in means) + "\n"
        (HERE / "federated.md").write_text(whole, encoding="utf-8")


if __name__ == "__main__":
    main()
